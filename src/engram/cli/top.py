"""``engram top``: numbers of a store in a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Unpack

from engram._support.words import format_share, format_size
from engram.buffer.configuration import Reaching
from engram.buffer.tensordict import ReplayBuffer
from engram.cli.show import fitted, stat_lines
from engram.inspect.advice import effective_size
from engram.samplers import RandomSampler
from engram.store.opening import ReaderStore

#: Of the last seconds, which say nothing of a store that no process uses.
_RATES = ("add_per_s", "sample_per_s")


def stats(directory: Path, form: str, known: Iterable[str] = ()) -> str:
    """``rb.stats()`` of the store in a directory, which is only read.

    Args:
        directory: of the store.
        form: ``"text"``, ``"json"`` or ``"prometheus"``.
        known: names of numbers that a text leaves out.

    Raises what opening the store raises. ``ModuleNotFoundError``: prometheus-client is missing.
    """
    with ReplayBuffer.open(directory, readonly=True) as rb:
        if form == "prometheus":
            return _exposed(rb, directory.resolve().name)
        found, store = rb.stats(), rb.storage.memory
        unused = _RATES if isinstance(store, ReaderStore) and not store.in_use else ()
    if form == "json":
        rates = dict.fromkeys(unused)
        return json.dumps({"store": str(directory), **found, **rates, "problems": []}, indent=2)
    lines = [*stat_lines({name: value for name, value in found.items() if name not in known}, unused)]
    if not found["usage_counted"]:
        lines.append(f"{'never_sampled_frac':<24}  not counted: rb.count_usage() begins")
    return "\n".join(fitted(lines))


def _exposed(rb: ReplayBuffer, name: str) -> str:
    """As a server shows them to Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    from engram.inspect.metrics import Collector

    registry = CollectorRegistry()
    registry.register(Collector({name: rb}))
    return generate_latest(registry).decode().rstrip("\n")


#: Moves the cursor to the top left, and empties the screen below.
_AGAIN = "\x1b[H\x1b[J"


def show(
    store: str, every: float, count: int | None, out: IO[str], *, as_json: bool = False, **secrets: Unpack[Reaching]
) -> None:
    """Look again and again, ``count`` times or for ever. Raises what opening the store or asking the server raises."""
    if Path(store).is_dir():
        rb = ReplayBuffer.open(store, readonly=True, sampler=RandomSampler())  # priorities would be copied
    else:
        rb = ReplayBuffer.connect(store, patience=0.0, **secrets)
    screen = out.isatty()
    with rb:
        before, began, looks = _look(rb), time.monotonic(), 0
        while count is None or looks < count:
            time.sleep(every)
            now, at = _look(rb), time.monotonic()
            if as_json:
                seconds, rates = at - began, rates_of(now, before, at - began)
                text = json.dumps({"store": store, "seconds": seconds, **now, **rates, "problems": []})
            else:
                said = [store, *lines(now, before, at - began)]
                width = shutil.get_terminal_size().columns if screen else sys.maxsize
                text = f"{_AGAIN if screen else ''}{chr(10).join(line[:width] for line in said)}\n"
            print(text, file=out, flush=True)
            before, began, looks = now, at, looks + 1


def _look(rb: ReplayBuffer) -> dict[str, float]:
    """Its numbers, and the effective sample size, which is that of its store's priorities, whatever its sampler."""
    effective = effective_size(rb.storage)
    return rb.stats() if effective is None else {**rb.stats(), "priority_ess": effective}


def rates_of(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Rows inserted and, where that is counted, sampled per second between two looks."""
    samples = "sample_count" if "sample_count" in now else "limit_samples"
    of = {"inserts_per_s": "write_count", "samples_per_s": samples}
    return {name: max(0.0, now[key] - before.get(key, 0)) / seconds for name, key in of.items() if key in now}


def lines(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> Iterator[str]:
    """What two looks at ``stats()`` say, that many seconds apart."""

    def rate(key: str) -> float:
        return max(0.0, now[key] - before.get(key, 0)) / seconds  # emptied meanwhile: 0

    filled = f" of {now['capacity']:,.0f} ({format_share(now['utilization'])})" if "capacity" in now else ""
    yield f"{'rows':<10} {now['size']:,.0f}{filled}, {format_size(int(now['bytes']))}"
    if "shards" in now:
        missing = f"; {now['rows_missing']:,.0f} rows are missing" if now["shards_missing"] else ""
        yield f"{'stores':<10} {now['shards'] - now['shards_missing']:.0f} of {now['shards']:.0f} answer{missing}"
    yield f"{'inserts':<10} {rate('write_count'):,.0f} rows/s"
    if "sample_count" in now:
        yield f"{'samples':<10} {rate('sample_count'):,.0f} rows/s, {now['replay_ratio']:.3g} per insert since it was empty"
    elif "limit_samples" in now:
        yield f"{'samples':<10} {rate('limit_samples'):,.0f} rows/s, {now['samples_per_insert']:.3g} per insert"
    else:
        yield f"{'samples':<10} not counted here"
    if "sample_wait_ms_p50" in now:
        yield f"{'wait':<10} {now['sample_wait_ms_p50']:.3g} ms a batch, 99 % below {now['sample_wait_ms_p99']:.3g} ms"
    yield from _of_rows(now)
    if "limit_samples" in now:
        for call in ("insert", "sample"):
            waiting, waited = now[f"{call}s_waiting"], rate(f"{call}_waited_s")
            yield f"{f'{call} waits':<12} {waiting:.0f} calls now; of each second {waited:.2f} s in all"
    if "limit_error" in now:
        low, level, high = (now[f"limit_{name}"] for name in ("lowest", "level", "highest"))
        yield f"{'level':<10} {level:,.0f}, to stay from {low:,.0f} to {high:,.0f}"
    if now.get("limit_max_in_flight"):
        yield f"{'in flight':<10} {now['limit_in_flight']:,.0f} of {now['limit_max_in_flight']:,.0f} rows"
    dropped = now["priority_updates_dropped"] + now["field_updates_dropped"]
    yield f"{'so far':<10} {now['lapped_rows']:,.0f} rows lapped, {now['redraws']:,.0f} drawn again, {dropped:,.0f} late updates dropped"
    for key, name in (("drawable_rows", "drawable"), ("priority_mass", "mass"), ("consumer_version", "version")):
        if key in now:
            yield f"{name:<10} {now[key]:,.6g}"


def _of_rows(now: Mapping[str, float]) -> Iterator[str]:
    """How old they and their copy are, and how diverse draws of them."""
    if "copy_age_s" in now:
        yield f"{'copy':<10} {now['copy_age_s']:,.1f} s behind"
    if "age_p99" in now:
        yield f"{'age':<10} {now['age_mean']:,.0f} writes, 99 % below {now['age_p99']:,.0f}"
    if "priority_ess" in now:
        yield f"{'effective':<10} draws by priority are as diverse as of {now['priority_ess']:,.0f} equally likely rows"
