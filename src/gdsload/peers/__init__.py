"""Serving weights to other processes and machines. Reading them is part of `gdsload.remote`."""

from gdsload.peers.server import (
    ServerStatus as ServerStatus,
    WeightServer as WeightServer,
    serve as serve,
)
