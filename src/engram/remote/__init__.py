"""The client's side of a served store: components that ask a server, through Arrow Flight.

Nothing is imported here, so that pyarrow is loaded when a buffer connects, and not before.
"""
