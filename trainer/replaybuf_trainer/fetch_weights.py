"""The process of `replaybuf fetch-weights`."""

from __future__ import annotations

import signal
import ssl
import threading

from replaybuf.certificates import client_context, open_certificate
from replaybuf.client.client import Client
from replaybuf.listening import url_of
from replaybuf.logs import announce
from replaybuf_trainer.follower import Follower
from replaybuf_trainer.options import FetchWeightsOptions
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.weight_download.helper import Helper
from replaybuf_trainer.weight_download.listening import ServerThread, check_exposure
from replaybuf_trainer.weight_download.local_weights import LocalWeights
from replaybuf_trainer.weight_download.staging import Staging


def fetch(options: FetchWeightsOptions) -> None:
    """Serve a trainer, or follow a run, until SIGTERM or SIGINT. Raises `Invalid`, and as `Follower.run`."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    tls = client_context(options.tls_ca)
    local = LocalWeights(options.folder, options.keep, options.publish_token, tls)
    staging = Staging(local)
    try:
        if options.run:
            _follow(options, staging, stop)
        else:
            _serve(options, local, staging, tls, stop)
    finally:
        staging.close()
        local.close()


def _serve(
    options: FetchWeightsOptions,
    local: LocalWeights,
    staging: Staging,
    tls: ssl.SSLContext,
    stop: threading.Event,
) -> None:
    check_exposure(options.host, options.publish_token, "host")
    helper = Helper(options.engine, local, staging, options.publish_token, options.engine_timeout_s, tls)
    certificate = open_certificate(options.tls_cert, options.tls_key)
    server = ServerThread(helper.application(), options.host, options.port, "--port", certificate)
    try:
        announce("listening on %s", url_of(options.host, server.port, tls=certificate is not None))
        stop.wait()
    finally:
        server.close()


def _follow(options: FetchWeightsOptions, staging: Staging, stop: threading.Event) -> None:
    engines = Engines([options.engine], options.engine_timeout_s, options.on_publish)
    with Client(options.url, options.run, token=options.token) as client:
        try:
            announce("following run %s at %s", options.run, options.url)
            Follower(client, engines, staging, options.adapter, stop).run()
        finally:
            engines.close()
