"""Stores: rows, tickets, cursors and indexes in one memory. Modules import those above them in this list: keys and memory;
blocks; locks; lifetime; indexes; adding; store; requests, device and readonly; elsewhere; opening.
"""

from engram.store import requests as requests  # served stores have its index: every process that opens one knows it
