"""Groups for producers with a generation loop of their own: from token ids, responses of servers, and environments.

=================  ==============================================================
`group_building`   groups from token ids, logprobs and rewards
`responses`        turns from responses of OpenAI-compatible servers
`reward_functions` rewards by functions with the signature of TRL
`traces`           rollouts from traces of verifiers
`failures`         failures for heartbeats
=================  ==============================================================
"""

from __future__ import annotations

from replaybuf.client.producers.failures import describe_failure
from replaybuf.client.producers.group_building import GroupBuilder, RolloutBuilder, group_builder
from replaybuf.client.producers.responses import ServerTurn, read_turns
from replaybuf.client.producers.reward_functions import Scored, call_rewards
from replaybuf.client.producers.traces import add_trace

__all__ = [
    "GroupBuilder",
    "RolloutBuilder",
    "Scored",
    "ServerTurn",
    "add_trace",
    "call_rewards",
    "describe_failure",
    "group_builder",
    "read_turns",
]
