"""Replay buffers: :class:`ReplayBuffer` wires components together, and the other classes are thin doors to it."""

from engram.buffer.replay_buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
