"""Errors that whoever serves an engine must tell apart, without importing what raises them."""


class EngineOverloadedError(RuntimeError):
    """As many requests wait as the front takes; try again later."""


class EngineDeadError(RuntimeError):
    """The engine's loop failed; the cause is chained. No request can be served any more."""
