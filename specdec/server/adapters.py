"""Loading and unloading adapters over HTTP, from inside one folder."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.adapters import Adapter
from specdec.config import check_adapter_name
from specdec.server.body import Fields, read_object
from specdec.server.errors import ApiError, as_api_error, bad_request, model_not_found
from specdec.server.front import ServingEngine
from specdec.server.settings import ServerSettings

_POLL_SECONDS = 0.02
_FIELDS = ("lora_name", "lora_path", "draft_lora_path")


class AdapterService:
    """/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

    def __init__(self, front: ServingEngine, settings: ServerSettings) -> None:
        self._front = front
        self._settings = settings

    async def load(self, request: Request) -> Response:
        """Load an adapter, or a new version of it under its name.

        Requests that run on the older version end on it. ``draft_lora_path``, which vLLM does not
        have: the draft model's adapter for the same requests.
        """
        root, fields = await self._begin(request)
        name, given = fields.string("lora_name"), fields.string("lora_path")
        of_draft = fields.string("draft_lora_path", None)
        fields.finish()
        if name == self._settings.model_name:
            raise bad_request(f"lora_name: {name!r} is the base model", "lora_name")
        try:
            check_adapter_name("lora_name", name)
            path = path_inside(root, given, "lora_path")
            draft_path = None
            if of_draft is not None:
                if not self._front.engine.takes_draft_lora:
                    raise ValueError("draft_lora_path: the server was started without --draft-lora")
                draft_path = path_inside(root, of_draft, "draft_lora_path")
            await self._front.add_lora(name, path, draft_path)
        except Exception as error:
            raise as_api_error(error, _FIELDS) or error from error
        return JSONResponse({"status": "loaded", "lora_name": name})

    async def unload(self, request: Request) -> Response:
        """Refuse new requests for an adapter at once; answer when its last one has ended."""
        _, fields = await self._begin(request)
        name = fields.string("lora_name")
        fields.finish()
        engine = self._front.engine

        def remove() -> list[Adapter]:
            if name not in engine.loras:
                raise model_not_found(name)
            return engine.remove_lora(name, wait=False)

        try:
            # Versions that come and go under the name later are others' to wait for.
            versions: list[Adapter] = await self._front.call(remove)
            async with asyncio.timeout(self._settings.timeout):
                while await self._front.call(lambda: any(v.num_requests for v in versions)):
                    await asyncio.sleep(_POLL_SECONDS)
        except Exception as error:
            raise as_api_error(error, _FIELDS) or error from error
        return JSONResponse({"status": "unloaded", "lora_name": name})

    async def _begin(self, request: Request) -> tuple[Path, Fields]:
        root = self._settings.lora_root
        if root is None:
            message = "adapters are loaded and unloaded over HTTP only with --lora-root DIR"
            raise ApiError(404, message, code="not_enabled")
        settings = self._settings
        values = await read_object(request, max_bytes=settings.max_body, timeout=settings.timeout)
        return root, Fields(values)


def path_inside(root: Path, given: str, field: str) -> Path:
    """The adapter's folder. Raises ValueError naming ``field`` where it, or a file of it, lies
    outside ``root``.
    """
    # What lies outside is never looked at, so that nobody learns what there is.
    root, path = _resolved(root, field), Path(given)
    if ".." in path.parts or "\0" in given:
        raise ValueError(f"{field}: {given!r} is not a plain path inside --lora-root")
    folder = _resolved(root / path, field)
    if not folder.is_relative_to(root):
        raise ValueError(f"{field}: {given!r} does not lie inside --lora-root")
    if folder.is_dir():
        for file in folder.iterdir():
            if not _resolved(file, field).is_relative_to(root):
                raise ValueError(f"{field}: {file.name!r} in {given!r} leads outside --lora-root")
    return folder


def _resolved(path: Path, field: str) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:
        # What Python before 3.13 says of links that lead to each other.
        raise ValueError(f"{field}: {path.name!r} is a link that leads nowhere") from error
