"""Memory that an imitated device reads, for tests."""

import mmap

import torch

from engram.store.memory import private_block

PAGE = mmap.PAGESIZE


def block(pages=4):
    """uint8 tensor of whole pages, private, its pages in memory."""
    made = private_block(pages * PAGE).tensor
    made.fill_(1)
    return made


def read_later(device, registered, nbytes, at=0):
    """Queue a kernel that reads, and return where it puts what it finds."""
    registered.use()
    out, address = device.on_device(torch.zeros(nbytes, dtype=torch.uint8)), registered.addresses[at]
    device.launch(lambda out: out.copy_(device.memory_at(address, nbytes)), out)
    return out
