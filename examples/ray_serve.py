# SPDX-License-Identifier: Apache-2.0
"""Ray Serve's OpenAI application with autoscaling engines of magicdec-self.

    python examples/ray_serve.py --min-replicas 1 --max-replicas 2

Then, for instance: `python examples/openai_client.py --base-url http://127.0.0.1:8000/v1`.
"""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray_cluster

TARGET_REQUESTS = 4


def callback(model: str) -> dict[str, Any]:
    """Return a callback that skips the download of a local model in every replica."""
    if not Path(model).exists():
        return {}
    from ray.llm._internal.common.callbacks.base import CallbackBase

    class WithoutDownload(CallbackBase):  # type: ignore[misc]
        async def on_before_node_init(self) -> None:
            self.ctx.run_init_node = False

    return {"callback_class": WithoutDownload}


def application(args: argparse.Namespace) -> Any:
    """Build Ray Serve's application."""
    from ray.serve.llm import LLMConfig, build_openai_app

    replicas = args.max_replicas
    config = LLMConfig(
        model_loading_config={
            "model_id": args.name or Path(args.model).name,
            "model_source": ray_cluster.model_source(args.model),
        },
        engine_kwargs=ray_cluster.engine_kwargs(args.engine_kwargs),
        placement_group_config=ray_cluster.placement(replicas, args.cpus),
        runtime_env={"env_vars": ray_cluster.environment(args.model, replicas)},
        deployment_config={
            "autoscaling_config": {
                "min_replicas": args.min_replicas,
                "max_replicas": replicas,
                "target_ongoing_requests": args.target_requests,
                "upscale_delay_s": args.upscale_delay,
                "downscale_delay_s": args.downscale_delay,
            },
            "max_constructor_retry_count": 2,  # Ray would retry a failing replica forever
        },
        log_engine_metrics=True,  # adds vLLM's and the plugin's metrics to Ray's endpoint
        callback_config=callback(args.model),
    )
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": {"num_replicas": 1}})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", help="the model's name in requests (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=ray_cluster.positive, default=1)
    parser.add_argument(
        "--target-requests",
        type=ray_cluster.positive,
        default=TARGET_REQUESTS,
        help=f"requests per replica above which another one starts (default {TARGET_REQUESTS})",
    )
    parser.add_argument(
        "--upscale-delay", type=float, default=30.0, help="seconds before a replica is added (default 30)"
    )
    parser.add_argument(
        "--downscale-delay", type=float, default=600.0, help="seconds before one is removed (default 600)"
    )
    ray_cluster.add_options(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if not 0 <= args.min_replicas <= args.max_replicas:
        sys.exit("error: --min-replicas has to be from 0 to --max-replicas")
    ray_cluster.connect(args.address, args.max_replicas, args.cpus)
    # Print the address early: jobs need not wait until the server is ready.
    joined = ray_cluster.address_to_join()
    print(f"Ray at {joined}; replicas start ...", flush=True)
    from ray import serve

    serve.start(http_options={"host": args.host, "port": args.port})
    try:
        serve.run(application(args), name="magicdec", route_prefix="/")
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    print(f"ready: http://{args.host}:{args.port}/v1, Ray at {joined} (Ctrl-C ends it)", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()


if __name__ == "__main__":
    main()
