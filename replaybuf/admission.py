"""Names that admission plug-ins build on. `replaybuf.kernel.strategy.admission_plugin` documents each of them."""

from replaybuf.kernel.strategy.admission_plugin import Admission, AdmissionOptions, Refusal
from replaybuf.wire.group import Group, split_rollouts

__all__ = ["Admission", "AdmissionOptions", "Group", "Refusal", "split_rollouts"]
