#!/usr/bin/env bash
#SBATCH --job-name=engram
#SBATCH --nodes=2
#SBATCH --signal=B:TERM@60
# A store on each node of the job, and your program, which uses all of them as one buffer:
#
#   sbatch --nodes=4 deploy/slurm.sh python train.py
#
# In the program:
#
#   rb = ReplayBuffer.connect(
#       os.environ["ENGRAM_ADDRESSES"], token=os.environ["ENGRAM_TOKEN"], tls_root=os.environ["ENGRAM_TLS_ROOT"]
#   )
#
# It runs once, on the first node; it may start others by srun --overlap.
#
# ENGRAM_DIR: a folder of each node's own disk for its store. ENGRAM_CAPACITY: rows of a store. ENGRAM_PORT: of all servers.
# ENGRAM_PATIENCE: seconds for all servers to answer.
# A job that is started again on the same nodes, with the same ENGRAM_DIR, goes on with the rows that are there.
set -euo pipefail

: "${ENGRAM_DIR:?a folder of the local disk of each node}"
capacity=${ENGRAM_CAPACITY:-1000000}
port=${ENGRAM_PORT:-7777}
patience=${ENGRAM_PATIENCE:-300}
if [ $# -eq 0 ]; then
  echo "slurm.sh: expected a program to run beside the stores, got none: sbatch slurm.sh python train.py" >&2
  exit 2
fi

# Secrets of this job, in the home directory, which all nodes see.
umask 077
secrets=$(mktemp -d "${HOME}/.engram-job-${SLURM_JOB_ID}-XXXXXX")
program= servers=
finish() {
  trap - EXIT TERM INT
  for step in $program $servers; do # the program first; srun passes the signal on, and servers finish what is under way
    kill -TERM "$step" 2>/dev/null || continue
    wait "$step" 2>/dev/null || true
  done
  rm -rf "$secrets"
}
trap finish EXIT
trap 'exit 143' TERM INT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
names=
addresses=
for node in "${nodes[@]}"; do
  names+="${names:+,}DNS:$node"
  addresses+="${addresses:+,}grpc+tls://$node:$port"
done
openssl rand -hex 32 >"$secrets/token"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=engram \
  -addext "subjectAltName=$names" -keyout "$secrets/tls.key" -out "$secrets/tls.crt" 2>/dev/null

srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0 \
  engram serve "$ENGRAM_DIR" --capacity "$capacity" --listen "0.0.0.0:$port" \
  --token "$secrets/token" --tls-cert "$secrets/tls.crt" --tls-key "$secrets/tls.key" &
servers=$!

for node in "${nodes[@]}"; do
  until engram health "grpc+tls://$node:$port" --token "$secrets/token" --tls-root "$secrets/tls.crt" >/dev/null; do
    if ! kill -0 "$servers" 2>/dev/null; then
      echo "slurm.sh: the servers ended before the one on $node answered" >&2
      exit 1
    elif ((SECONDS > patience)); then
      echo "slurm.sh: the server on $node did not answer within $patience s (ENGRAM_PATIENCE)" >&2
      exit 1
    fi
    sleep 1
  done
done

export ENGRAM_ADDRESSES=$addresses ENGRAM_TOKEN=$secrets/token ENGRAM_TLS_ROOT=$secrets/tls.crt
srun --overlap --nodes=1 --ntasks=1 "$@" &
program=$!
wait "$program"
