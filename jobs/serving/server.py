"""The server from its start to its end: store, keeper and routes together, on one address. It stands alone because it
loads libraries that are an extra."""

# pyright: reportMissingImports=false

import logging
from pathlib import Path

import uvicorn

from .app import make_app
from .config import ServeConfig
from .keeper import Keeper
from .store import BatchStore

log = logging.getLogger(__name__)


def serve(config: ServeConfig, output_root: Path) -> None:
    """Answers until it is interrupted. The job of a batch goes on then, and the next server takes it up."""
    store = BatchStore(output_root / "serve")
    keeper = Keeper(store, config.settings, output_root)
    if not config.is_loopback:
        log.warning(
            "host=%s: whoever reaches this address can start batches and read every file, as there is no password",
            config.host,
        )
    log.info("serving http://%s:%d/v1; batches lie in %s", config.host, config.port, output_root / "generate")
    keeper.start()
    try:
        uvicorn.Server(
            uvicorn.Config(
                make_app(config, store, keeper),
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=64 * 1024,
            )
        ).run()
    finally:
        keeper.stop()
