"""Start Ray on a machine that may be busy: Ray gives up after 30 seconds, whatever is configured."""

from __future__ import annotations

import ray

ATTEMPTS = 5


def start_ray(num_cpus: int) -> None:
    """Start a Ray of our own whose workers know the back end."""
    for attempt in range(ATTEMPTS):
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                runtime_env={"worker_process_setup_hook": "replaybuf_transferqueue.register"},
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise
