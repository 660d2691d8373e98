"""Start Ray on a machine that may be busy.

Ray's limits come from variables that its processes inherit. No variable changes the 30 seconds that Ray waits for a
node to start, so that start is tried again.
"""

from __future__ import annotations

import os

import ray

ATTEMPTS = 5
PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_WORKER_PROCESS_SETUP_HOOK_LOAD_TIMEOUT": "300",
    # Ray's default is 15, which a busy machine starves.
    "RAY_worker_niceness": "0",
    # Less work at each start.
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
os.environ.update(PATIENCE)


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
