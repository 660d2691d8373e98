"""The publisher `http`: serves the weights by HTTP to the helpers of engines that share no folder with the trainer.

`--engine` is the address of a helper, `replaybuf fetch-weights`, which passes the trainer's calls on to its engine::

    commit(v)   every helper downloads v, engines sample on ──► pause ──► the engine reads the copy ──► label ──► resume

So engines are switched as by `reload`: fenced, labelled after the load, and again after a restart. Without `--engine` a
version is announced when the trainer serves it, and helpers with `--run` load what is announced.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from replaybuf.certificates import client_context, open_certificate
from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.files import read_bounded
from replaybuf.listening import url_of
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.publishers.engine import Engine, Unknown
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.folder import VersionFolders
from replaybuf_trainer.publishers.publisher import Confirm, PublisherSetup, Weights
from replaybuf_trainer.publishers.reload import FolderLoader
from replaybuf_trainer.publishers.weights_server import WeightsServer
from replaybuf_trainer.weight_download.helper import STAGE, StageAnswer
from replaybuf_trainer.weight_download.listening import check_exposure
from replaybuf_trainer.weight_download.local_weights import with_digest
from replaybuf_trainer.weight_download.manifest import (
    LARGEST_MANIFEST_BYTES,
    LARGEST_SHARD_BYTES,
    MANIFEST,
    SHARD_BYTES,
    digest_of,
    write_manifest,
)

logger = logging.getLogger(__name__)


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the publisher http.

    - `host`: address to listen on; without `--publish-token` it must be a loopback address
    - `port`: port to listen on; 0 takes a free one
    - `url`: address at which helpers reach the trainer, such as a proxy with TLS; None = that of `host`
    - `tls_cert`, `tls_key`: files (PEM) with certificate chain and key, without a password, to serve weights with TLS;
      renewed files are read again
    - `tls_ca`: file (PEM) of the authorities to trust for helpers at https addresses; None = those of the system
    - `shard_bytes`: size of a shard; a shard that was not complete is downloaded again after a crash
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8910
    url: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    shard_bytes: Annotated[int, Meta(ge=1 << 16, le=LARGEST_SHARD_BYTES)] = SHARD_BYTES


class UriLoader(FolderLoader):
    """Lets the helper of an engine download the weights, and the engine read the copy."""

    def __init__(self, uri: str, adapter: str) -> None:
        self.adapter = adapter
        self._location = uri

    def stage(self, engine: Engine) -> int | None:
        """Ask the helper for the weights; None = they are there, else the bytes so far. Raises `ServiceUnavailable`."""
        try:
            answer = engine.post(STAGE, {"weights_uri": self._location}, attempts=1)
            staged = msgspec.json.decode(answer, type=prepared(StageAnswer))
        except (Unknown, msgspec.MsgspecError, UnicodeDecodeError) as error:
            detail = f"engine {engine.url} is not a helper: {error}; give --engine the address of fetch-weights"
            raise ServiceUnavailable(detail, name="engine", value=engine.url) from error
        except ServiceUnavailable as error:
            refused = isinstance(error.__cause__, httpx.ConnectError) and "CERTIFICATE_VERIFY_FAILED" in error.detail
            if not refused:
                raise
            detail = f"{error.detail}; tls_ca of --publisher-options names the certificate of its authority"
            raise ServiceUnavailable(detail, name="tls_ca", value=engine.url) from error
        return None if staged.complete else staged.progress_bytes


class HttpPublisher(VersionFolders):
    """Serves each version, and loads it through helpers into all engines, again into engines that restarted."""

    Options = HttpOptions

    def __init__(self, setup: PublisherSetup, options: HttpOptions) -> None:
        """Check the address. Raises `Invalid`."""
        super().__init__(setup, options)
        check_exposure(options.host, setup.publish_token, "host")
        if options.url is not None and not options.url.startswith(("http://", "https://")):
            raise Invalid(f"url is {options.url!r}; it must be http or https", name="url", value=options.url)
        self._server: WeightsServer | None = None
        self._certificate = open_certificate(options.tls_cert, options.tls_key)
        if setup.engines:
            tls = client_context(options.tls_ca)
            self._engines = Engines(
                setup.engines, setup.engine_timeout_s, setup.on_publish, token=setup.publish_token, tls=tls
            )
        else:
            logger.warning(
                "there is no --engine: versions are announced before any engine has loaded them; "
                "start `replaybuf fetch-weights RUN` beside each engine"
            )

    def prepare(self, version: int, weights: Weights) -> None:
        """Stage the folder of a version with its manifest. Raises `TrainingFault` for a full disk."""
        self._adapter = weights.adapter
        self._describe(version, self._folders.write(version, weights))

    def load(self, version: int, adapter: str, confirm: Confirm) -> str:
        """Serve the folder, and load it into the engines. Raises `ServiceUnavailable` if none takes it."""
        folder = self._folders.path(version, adapter)
        if not (folder / MANIFEST).is_file():  # another publisher wrote it
            self._describe(version, folder)
        uri = self._uri(version, adapter)
        self._serve()
        if self._engines is not None:
            loader = UriLoader(uri, adapter)
            self._engines.stage(loader, version)
            self._engines.switch(loader, version, confirm)
        return uri

    def in_use(self, folder: Path) -> bool:
        """Return whether a helper downloads an old version."""
        return self._serve().in_use(folder)

    def close(self) -> None:
        """End the watch and the server."""
        super().close()
        if self._server is not None:
            self._server.close()

    def _describe(self, version: int, folder: Any) -> None:
        try:
            write_manifest(folder, version, self.options.shard_bytes)
        except OSError as error:
            detail = f"the manifest of version {version} cannot be written to {folder}: {error}; free some space"
            raise TrainingFault(detail, name="weights_dir", value=str(folder)) from error

    def _uri(self, version: int, adapter: str) -> str:
        folder = self._folders.path(version, adapter)
        below = folder.relative_to(self.setup.weights_dir).as_posix()
        options, tls = self.options, self._certificate is not None
        base = options.url or url_of(options.host, self._serve().port, tls=tls)
        try:
            digest = digest_of(read_bounded(folder / MANIFEST, LARGEST_MANIFEST_BYTES))
        except OSError as error:
            detail = f"the manifest of version {version} cannot be read: {error}; delete {folder}"
            raise TrainingFault(detail, name="weights_dir", value=str(folder)) from error
        return with_digest(f"{base.rstrip('/')}/{below}/", digest)

    def _serve(self) -> WeightsServer:
        """Return the server. It starts with the first version, because only the first rank has one."""
        if self._server is None:
            setup, options = self.setup, self.options
            setup.weights_dir.mkdir(parents=True, exist_ok=True)
            self._server = WeightsServer(
                setup.weights_dir, options.host, options.port, setup.publish_token, self._certificate
            )
            logger.info("weights are served at port %d", self._server.port)
        return self._server
