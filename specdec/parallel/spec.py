"""What a rank must know to build its part of an engine, and how rank 0 tells it."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.verifier.made import MadeModel

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank's part in an engine."""

    rank: int
    size: int
    port: int  # of the store at which the ranks meet
    model: str | Path | MadeModel | None
    draft: str | Path | MadeModel | None
    k: int | str
    config: EngineConfig  # with the device of this rank
    num_threads: int

    @property
    def group(self) -> str:
        """A name for the ranks that no other engine of their processes has."""
        return f"specdec:{self.port}"


def send(connection: Connection, message: Any) -> None:
    # Connection.send would hand tensors over in shared memory, by a server of its own.
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Raises EOFError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
