"""A replica's process: ``python -m specdec.replicas.worker SOCKET``.

It reads its plan, one line of JSON, from standard input, serves on the Unix socket, and says so in
one line of JSON on standard output: ``{"ready": ...}``, or ``{"error": ...}`` for a user's mistake.
When standard input ends, because whoever started it is gone, it ends as on SIGTERM.
"""

import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from specdec.replicas.plan import ServePlan

USER_ERRORS = (ValueError, TypeError, OSError, NotImplementedError)


def main() -> None:
    # What a library prints goes to standard error, not into the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    plan = ServePlan.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    from specdec.engine import Engine
    from specdec.graph_report import start_up_line
    from specdec.server.run import serve

    try:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(sys.argv[1])
        engine = Engine(plan.model, plan.draft, plan.k, **plan.fields)
    except USER_ERRORS as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        say(error=" ".join(str(error).split()))
        sys.exit(2)

    def on_ready() -> None:
        say(ready=start_up_line(engine.graph_table(), engine.capture_seconds))

    # Who stops a replica has waited for what it runs; what is left is told at once.
    serve(engine, plan.settings, bound, drain_timeout=0, on_ready=on_ready)


def _end_with_starter() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
