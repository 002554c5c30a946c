"""The routes of the OpenAI door. FastAPI finds the route; a POST reads its body and writes its answer itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from coordinator import validate
from coordinator.http.calls import Call
from coordinator.http.chat_completions import chat_completions
from coordinator.http.completions import completions
from coordinator.http.door import Door
from coordinator.http.errors import Rejected, error_body, meaning_of
from coordinator.http.generation import Asked, generate
from coordinator.http.schemas import ChatCompletions, Completions, Detokenize, Tokenize
from coordinator.http.tokens import detokenize, tokenize
from kvrelay.errors import Internal, KVRelayError
from kvrelay.telemetry.metrics import exposition

CODES = {404: "not_found", 405: "method_not_allowed"}
Work = Callable[[Call], Awaitable[None]]


class Worked(Response):
    """Answers one POST with whatever `work` does."""

    def __init__(self, door: Door, work: Work) -> None:
        super().__init__()
        self._door, self._work = door, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Call(self._door, scope, receive, send).run(self._work)


def build_app(door: Door) -> FastAPI:
    app = FastAPI(title="KVRelay", version=version("kvrelay"), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    _add_posts(app, door)
    _add_gets(app, door)
    return app


def _add_posts(app: FastAPI, door: Door) -> None:
    routes: list[tuple[str, type[BaseModel], Work]] = [
        ("/v1/completions", Completions, _generation(completions)),
        ("/v1/chat/completions", ChatCompletions, _generation(chat_completions)),
        ("/tokenize", Tokenize, tokenize),
        ("/detokenize", Detokenize, detokenize),
    ]
    for path, schema, work in routes:
        content = {"application/json": {"schema": schema.model_json_schema()}}
        extra = {"requestBody": {"required": True, "content": content}}
        app.add_api_route(path, _endpoint(door, work), methods=["POST"], openapi_extra=extra, response_model=None)


def _endpoint(door: Door, work: Work) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Worked(door, work)

    return endpoint


def _generation(read: Callable[[bytearray, str], Asked]) -> Work:
    async def work(call: Call) -> None:
        asked = read(await call.body(), call.ids.label)
        call.names = asked.names
        await generate(call, asked)

    return work


def _add_gets(app: FastAPI, door: Door) -> None:
    async def health() -> Response:
        """200: it can serve; 503: there is no decode worker, or it is shutting down."""
        return Response(status_code=200 if door.ready else 503)

    async def about() -> dict[str, str]:
        return {"version": version("kvrelay")}

    async def metrics() -> Response:
        return Response(exposition(door.collect), media_type=CONTENT_TYPE_LATEST)

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(door)]}

    async def model(model: str) -> Response:
        try:
            validate.check_model(model, door.serving.limits)
        except KVRelayError as error:
            return _error(error)
        return JSONResponse(_model(door))

    _add_get(app, "/health", health)
    _add_get(app, "/version", about)
    _add_get(app, "/metrics", metrics)
    _add_get(app, "/v1/models", models)
    _add_get(app, "/v1/models/{model:path}", model)


def _add_get(app: FastAPI, path: str, endpoint: Callable[..., Any]) -> None:
    """HEAD too, which is the same without a body."""
    app.add_api_route(path, endpoint, methods=["GET"])
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _model(door: Door) -> dict[str, Any]:
    limits = door.serving.limits
    return {
        "id": limits.model_id,
        "object": "model",
        "created": door.opened_at,
        "owned_by": "kvrelay",
        "root": limits.model_id,
        "parent": None,
        "max_model_len": limits.context_limit,
    }


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    answer = _error(Rejected(error.status_code, words, CODES.get(error.status_code, "invalid_request")))
    answer.headers.update(error.headers or {})
    return answer


async def _on_bug(_: Request, __: Exception) -> Response:
    """Of a GET; uvicorn logs it."""
    return _error(Internal("internal error; see the server's log"))


def _error(error: KVRelayError) -> Response:
    return Response(error_body(error), meaning_of(error).status, media_type="application/json")
