"""Routes of a server of vLLM, as one of its endpoint plugins (`VLLM_PLUGINS=rlhf`, see `pyproject.toml`).

    GET  /v1/rlhf/status   version of the weights, settings, and the number of this start of the server
    POST /v1/rlhf/load     load weights, from a file or by NCCL: pause, update, resume

The key of the server guards all routes below /v1 and /inference. Routes of vLLM outside of these are removed,
except those that only report. A server that listens beyond this machine refuses to start without a key.

A load is one request, so a trainer that ends during a load leaves no update open. Running requests are kept:
vLLM computes their keys and values again, so their next tokens have the log-probs of the new weights. A load
that fails cannot be undone, so the server then ends itself, with all its processes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import State
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from rlhf.core.machine import is_loopback
from rlhf.generators.servers.process import LOAD, STATUS
from rlhf.generators.vllm.sampler import FILES
from rlhf.processes.signals import end_group

_OPEN = ("/health", "/metrics", "/version", "/ping")  # they report, change nothing and need no key
_GUARDED = ("/v1/rlhf/", "/inference/")
_LAST_ANSWER_S = 0.5  # for the answer to a load that failed

router = APIRouter()


class _Load(BaseModel):
    """The body of a load."""

    version: int
    limit_s: float  # seconds that the load may take
    update: dict[str, Any]  # as the weight-transfer engine of the server reads it
    group: dict[str, Any] | None = None  # NCCL: the group that the workers join first


class Routes:
    """The plugin."""

    name = "rlhf"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and remove those that are not needed.

        Raises:
            ValueError: the server would listen beyond this machine without a key.
        """
        args = app.state.args
        if not (args.api_key or os.environ.get("VLLM_API_KEY")) and not is_loopback(f"http://{args.host}"):
            raise ValueError(
                "VLLM_API_KEY must be set for a server that listens beyond this machine, got none with "
                f"--host {args.host}"
            )
        app.include_router(router)
        kept, routes = (*_GUARDED, *_OPEN), app.router.routes
        routes[:] = [route for route in routes if getattr(route, "path", "").startswith(kept)]

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        """Prepare the engine for loads."""
        state.rlhf_start, state.rlhf_lock, state.rlhf_ends = secrets.token_hex(8), asyncio.Lock(), False
        transfer = engine_client.vllm_config.weight_transfer_config
        if transfer.backend == FILES:  # for NCCL, the first load has the group to join
            await engine_client.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))


@router.get(STATUS)
async def _status(request: Request) -> dict[str, Any]:
    """Return the state of the server; the engine and its workers must answer."""
    if request.app.state.rlhf_ends:
        raise HTTPException(503, "a load failed, so this server ends itself")
    engine = request.app.state.engine_client
    settings = engine.vllm_config
    await engine.collective_rpc("answers")
    return {
        "start": request.app.state.rlhf_start,
        "version": await engine.get_weight_version(),
        "model": settings.model_config.hf_config.to_dict(),
        "dtype": str(settings.model_config.dtype).removeprefix("torch."),
        "head_dtype": str(settings.model_config.head_dtype).removeprefix("torch."),
        "max_model_len": settings.model_config.max_model_len,
        "max_num_seqs": settings.scheduler_config.max_num_seqs,
        "absent_ids": settings.additional_config.get("absent_ids", []),
        "weights": settings.weight_transfer_config.backend,
    }


@router.post(LOAD)
async def _load(body: _Load, request: Request) -> JSONResponse:
    """Load weights, and return their version and the checksums of the tensors that every worker loaded."""
    engine = request.app.state.engine_client
    async with request.app.state.rlhf_lock:
        try:
            async with asyncio.timeout(body.limit_s):
                await engine.pause_generation(mode="keep")
                if body.group is not None:
                    group = WeightTransferInitRequest(init_info=body.group)
                    await engine.init_weight_transfer_engine(group)
                await engine.start_weight_update()
                await engine.update_weights(WeightTransferUpdateRequest(update_info=body.update))
                await engine.finish_weight_update(str(body.version))
                taken = await engine.collective_rpc("taken_checksums")
                if any(other != taken[0] for other in taken):
                    raise RuntimeError("the workers of the server have different tensors")
                version = int(await engine.get_weight_version())
                await engine.resume_generation()
        except Exception as error:
            request.app.state.rlhf_ends = True
            threading.Timer(_LAST_ANSWER_S, end_group).start()
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"version": version, "checksums": taken[0]})
