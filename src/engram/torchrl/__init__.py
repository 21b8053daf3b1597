"""Folders that TorchRL's ``ReplayBuffer.dumps`` wrote."""
