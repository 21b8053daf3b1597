"""What type checkers find wrong. `make check` fails where one of these lines is no error."""

import engram

engram.ReplayBuffer(storage=engram.LazyTensorStorage(10), batchsize=3)  # type: ignore[call-arg]
engram.TensorDictReplayBuffer(storage=engram.LazyTensorStorage(10), prioritykey="loss")  # type: ignore[call-arg]
engram.PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storag=None)  # type: ignore[call-arg]
engram.LazyTensorStorage(10, lane=3)  # type: ignore[call-arg]
engram.LazyMemmapStorage(10, scratchdir="a")  # type: ignore[call-arg]
engram.ListStorage(10, devise="cpu")  # type: ignore[call-arg]
engram.SliceSampler(num_slicez=4)  # type: ignore[call-arg]
engram.PrioritizedSampler(10, 0.6, 0.4, epsilon=1e-8)  # type: ignore[arg-type]
engram.RoundRobinWriter(track_generation=True)  # type: ignore[arg-type]
rb: engram.ReplayBuffer[dict[str, int]] = engram.ReplayBuffer()
rb.sample(return_inf=True)  # type: ignore[call-overload]
rb.sample(4, device=1.5)  # type: ignore[call-overload]
rb.extend([{}], lain=0)  # type: ignore[call-arg]
