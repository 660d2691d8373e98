"""The admission plug-in `toploc`: it computes the hidden states of a rollout again and verifies its proof."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from replaybuf.admission import Admission, AdmissionOptions, Group, Refusal, split_rollouts
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf_toploc.proofs import explain_malformed, explain_mismatch

if TYPE_CHECKING:
    import torch

MODELS_KEPT = 2
"""Newest versions whose models stay in memory."""
_SHARE_BYTES = 8


class ToplocOptions(AdmissionOptions, frozen=True):
    """Where the weights are, what a proof looks like, and which share of the groups is verified.

    - `model`: folder of the weights of a version, as in `/run/weights/v{version:06d}`, the trainer's `--weights-dir`
    - `chunk_tokens`, `topk`: those with which producers build proofs; a chunk of 1 token shows one changed token
    - `check_share`: share of the groups that is verified; `seed_file` has the secret that chooses them
    """

    model: str
    chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 32
    topk: Annotated[int, Meta(ge=1, le=4096)] = 128
    check_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed_file: str | None = None
    threads: Annotated[int, Meta(ge=1, le=256)] = 1


class Toploc(Admission[ToplocOptions]):
    """Admits groups whose completions were computed with the weights of their policy version.

    A share of the groups is chosen by a keyed hash of prompt and version, so a producer cannot foresee which, and a
    prompt that is sent again is chosen again.
    """

    Options = ToplocOptions
    reasons = ("malformed_proof", "wrong_proof", "several_versions", "unknown_version")
    requires = ("proofs",)

    def __init__(self, options: ToplocOptions) -> None:
        import toploc  # noqa: F401 - it and transformers take seconds to import, which is no time of a check
        import torch
        import transformers  # noqa: F401

        super().__init__(options)
        if options.check_share < 1 and options.seed_file is None:
            raise ValueError(f"check_share is {options.check_share}; a share needs seed_file, a file with a secret")
        self._key = (
            hashlib.sha256(read_bounded(Path(options.seed_file), CONFIG_BYTES)).digest() if options.seed_file else b""
        )
        self._models: OrderedDict[int, Any] = OrderedDict()
        torch.set_num_threads(options.threads)

    def check(self, group: Group) -> Refusal | None:
        """Verify the proof of each rollout. A group that is not chosen must have proofs of the right form."""
        rollouts, options = list(split_rollouts(group)), self.options
        for number, rollout in enumerate(rollouts):
            tokens = len(rollout["completion_ids"])
            if why := explain_malformed(rollout["proof"], tokens, options.chunk_tokens, options.topk):
                return Refusal("malformed_proof", f"rollouts[{number}].proof: {why}")
        if group.policy_version != group.policy_version_max:  # a way around the check otherwise
            versions = f"{group.policy_version} to {group.policy_version_max}"
            return Refusal("several_versions", f"versions {versions} sampled the group; only one can be verified")
        if not self.chooses(group):
            return None
        folder = Path(options.model.format(version=group.policy_version))
        if not folder.is_dir():
            return Refusal("unknown_version", f"the weights of version {group.policy_version} are not in {folder}")
        model = self._model(group.policy_version, folder)
        for number, rollout in enumerate(rollouts):
            hidden = hidden_states(model, rollout["prompt_ids"].tolist(), rollout["completion_ids"].tolist())
            if why := explain_mismatch(rollout["proof"], hidden, options.chunk_tokens, options.topk):
                return Refusal("wrong_proof", f"rollouts[{number}].proof, {why}")
        return None

    def chooses(self, group: Group) -> bool:
        """Return whether a group is verified: by its prompt and version, and the secret."""
        if self.options.check_share == 1:
            return True
        prompt = group.prompt_id if group.prompt_index is None else group.prompt_index
        name = f"{group.adapter}\n{group.policy_version}\n{prompt}".encode()
        drawn = hashlib.blake2b(name, digest_size=_SHARE_BYTES, key=self._key).digest()
        return int.from_bytes(drawn) < int(self.options.check_share * 256**_SHARE_BYTES)

    def _model(self, version: int, folder: Path) -> Any:
        if version not in self._models:
            self._models[version] = load_model(folder)
        self._models.move_to_end(version)
        while len(self._models) > MODELS_KEPT:
            self._models.popitem(last=False)
        return self._models[version]


def load_model(folder: Path) -> Any:
    """Load the layers of a causal language model, without its head, from a local folder."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, local_files_only=True).eval()


def hidden_states(model: Any, prompt_ids: list[int], completion_ids: list[int]) -> torch.Tensor:
    """Return the last hidden states [C, H] that predict the tokens of a completion, in one pass over all tokens."""
    import torch

    with torch.inference_mode():
        tokens = torch.tensor([prompt_ids + completion_ids[:-1]])
        hidden: torch.Tensor = model(input_ids=tokens).last_hidden_state[0, len(prompt_ids) - 1 :]
    return hidden
