"""The routes of the OpenAI-compatible front, and those that operators and routers ask.

A request goes the way of a gRPC call: its prompt and parameters to `Frontend.submit`, its deltas
back (`answers.py`). A client that leaves ends its request in the engine.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from jaxinfer.request import EngineStoppedError
from jaxinfer.text import AnyPrompt
from jaxinfer_service import status, version
from jaxinfer_service.http import answers, errors, page, schema
from jaxinfer_service.http.body import BoundedBody
from jaxinfer_service.http.generation import Ask, answer, stream
from jaxinfer_service.http.strict import renamed
from jaxinfer_service.live import INTERVAL, MAP_CELLS, LiveView
from jaxinfer_service.metrics.collector import Metrics
from jaxinfer_service.model import ServedModel, loaded
from jaxinfer_service.tracing import names
from jaxinfer_service.tracing.current import note

# For the OpenAPI document: what answers may be besides JSON.
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


class HttpFront:
    """The app, which answers 503 until `serve` is called."""

    def __init__(self, metrics_prefix: str, live: LiveView) -> None:
        self.served: ServedModel | None = None
        self._live = live
        self._metrics = Metrics(metrics_prefix)
        self.app = FastAPI(
            title="jaxinfer",
            version=version(),
            docs_url=None,
            redoc_url=None,
            responses=errors.DOCUMENTED,
        )
        errors.install(self.app)
        self.app.add_middleware(BoundedBody)
        self._add_routes()

    def serve(self, served: ServedModel) -> None:
        """Answer from now on."""
        self.served = self._metrics.served = served

    def _add_routes(self) -> None:
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/models/{name:path}")(self.model)
        self.app.post("/v1/completions", responses=_EVENTS)(self.completions)
        self.app.post("/v1/chat/completions", responses=_EVENTS)(self.chat_completions)
        self.app.post("/tokenize")(self.tokenize)
        self.app.post("/detokenize")(self.detokenize)
        self.app.get("/health", responses=_TEXT)(self.health)
        self.app.get("/ready", responses=_TEXT)(self.ready)
        for path in ("/health", "/ready"):  # as some load balancers ask
            self.app.head(path, include_in_schema=False)(self.health)
        self.app.get("/version")(self.version)
        self.app.get("/metrics", responses=_TEXT)(self.metrics)
        self.app.get("/", include_in_schema=False)(page.page)
        self.app.get("/live", responses=_EVENTS)(self.live)

    def _model(self, name: str = "") -> ServedModel:
        """The served model. Raises EngineStoppedError while there is none, ModelNotFoundError for
        the name of another."""
        model = loaded(self.served)
        note(names.REQUEST_MODEL, name or model.names[0])
        status.check_model(model.names, name)
        return model

    # -- generation ------------------------------------------------------------------------------

    async def completions(self, body: schema.Completion, request: Request) -> Response:
        model = self._model(body.model)
        text = model.opened.text
        params, usual = body.params(), body.usual_length(text.sampling)
        schema.check_prompts(body.prompts, params.get("n", 1), text.limits)
        several = len(body.prompts) > 1
        asks = [
            Ask(model, prompt, params, body, f"prompt[{place}]" if several else "prompt", usual)
            for place, prompt in enumerate(body.prompts)
        ]
        shape = answers.Completions(text, body)
        return await self._generate(asks, shape, body, request)

    async def chat_completions(self, body: schema.ChatCompletion, request: Request) -> Response:
        model = self._model(body.model)
        parallel = body.parallel_tool_calls is not False
        prompt = body.conversation(body.messages, model.opened.replies, parallel)
        params = body.params_of(model.opened.replies)
        asks = [Ask(model, prompt, params, body, "messages")]
        shape = answers.Chats(model.opened.text, body.prompt_logprobs)
        return await self._generate(asks, shape, body, request)

    async def _generate(
        self, asks: list[Ask], shape: answers.Shape, body: schema.Sampling, request: Request
    ) -> Response:
        note(names.REQUEST_STREAM, bool(body.stream))
        if not body.stream:
            return await answer(asks, shape, request)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return await stream(asks, shape, with_usage, request)

    # -- text ------------------------------------------------------------------------------------

    async def tokenize(self, body: schema.Tokenize) -> dict[str, Any]:
        model = self._model(body.model)
        prompt: AnyPrompt
        if body.messages is not None:
            prompt = body.conversation(body.messages)
        else:
            prompt = body.prompt or ""
        special = body.add_special_tokens is not False
        with renamed(body.renamed):
            ids = await model.frontend.encode(prompt, special)
        found = {
            "count": len(ids),
            "max_model_len": model.opened.text.limits.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [answers.shown(model.opened.text.token_bytes(i)) for i in ids]
        return found

    async def detokenize(self, body: schema.Detokenize) -> dict[str, Any]:
        model = self._model(body.model)
        with renamed(body.renamed):
            text = await model.frontend.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    # -- what is served, and how it is -------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        model = self._model()
        return {"object": "list", "data": [answers.model_card(model, name) for name in model.names]}

    async def model(self, name: str) -> dict[str, Any]:
        if not name:
            return await self.models()
        return answers.model_card(self._model(name), name)

    async def health(self) -> Response:
        """Whether the engine goes on; 503 with the reason if not, and before it begins."""
        return self._well()

    async def ready(self) -> Response:
        """Whether requests are taken now."""
        return self._well()

    def _well(self) -> Response:
        if reason := loaded(self.served).frontend.unavailable():
            raise EngineStoppedError(reason)
        return PlainTextResponse("")

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def live(self, interval: float = INTERVAL, cells: int = MAP_CELLS) -> Response:
        """The engine's load, steps, slots and page maps, every `interval` seconds."""
        return await page.live(self._live, self._model(), interval, cells)

    async def version(self) -> dict[str, str]:
        return {"version": version()}
