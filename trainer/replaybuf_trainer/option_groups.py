"""Options of `replaybuf train` that hold several values, as a JSON object or a table in TOML files."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from replaybuf.errors import Invalid, counted
from replaybuf.option_types import OptionGroup, Positive, about, group_option

Count = Annotated[Positive, Meta(le=1 << 24)]


@group_option
class FakeShapes(OptionGroup, frozen=True, kw_only=True):
    """Shapes of made-up batches, such as {"seq_len": 8192, "groups": 32, "tail": 1.5}.

    Raises `Invalid` where no completion fits.
    """

    groups: Annotated[Count, about("Groups in a batch.")] = 4
    group_size: Annotated[Count, about("Rollouts in a group.")] = 4
    seq_len: Annotated[Count, about("Tokens of a micro-batch.")] = 512
    pad_to_multiple_of: Annotated[Count, about("Number of which the tokens of a micro-batch are a multiple.")] = 1
    prompt_tokens: Annotated[Count, about("Mean length of prompts, which differ by up to half of it.")] = 32
    completion_tokens: Annotated[Count, about("Median length of completions, cut at seq_len tokens of a rollout.")] = 64
    tail: Annotated[
        float, about("Standard deviation of its logarithm: 0 = all the same, 1.5 = a few very long ones.", ge=0, le=4)
    ] = 1.0
    masked_share: Annotated[float, about("Share of completion tokens that the policy did not sample.", ge=0, lt=1)] = (
        0.0
    )
    staleness: Annotated[int, about("Maximum staleness; groups are equally often of each age.", ge=0, le=1 << 20)] = 1
    vocab_size: Annotated[Count | None, about("Number of token ids. Default: that of the model.")] = None

    def __post_init__(self) -> None:
        longest = self.prompt_tokens + self.prompt_tokens // 2
        if longest >= self.seq_len:
            raise Invalid(
                f"prompts have up to {counted(longest, 'token')}, and seq_len is {self.seq_len}: no completion fits; "
                "set a smaller prompt_tokens or a larger seq_len",
                name="prompt_tokens",
                value=self.prompt_tokens,
                bound=self.seq_len,
            )


@group_option
class ReaderOptions(OptionGroup, frozen=True, kw_only=True):
    """Requests for batches, such as {"wait_ms": 1000}."""

    poll_s: Annotated[float, about("Seconds between two requests for a batch.", gt=0)] = 0.5
    wait_ms: Annotated[int, about("Time that the service may hold a request; 0 = no long poll.", ge=0)] = 0
    prefetch: Annotated[bool, about("Request the next batch while this one trains.")] = True


@group_option
class HeldOutOptions(OptionGroup, frozen=True, kw_only=True):
    """Evaluations on --eval-from, such as {"every_steps": 50}."""

    every_steps: Annotated[Positive, about("Steps between two passes over the held-out groups.")] = 20
    groups: Annotated[Positive, about("Maximum number of groups, the first of the export.")] = 64


@group_option
class ModelOptions(OptionGroup, frozen=True, kw_only=True):
    """Computation of the layers, such as {"attention": "flash"}."""

    attention: Annotated[
        Literal["eager", "sdpa", "flash"],
        about("eager, sdpa, or flash: FlashAttention on a GPU with --dtype bfloat16. Gemma 2 needs eager or flash."),
    ] = "sdpa"
    activation_checkpointing: Annotated[
        int, about("Compute every n-th layer again in the backward pass, to save memory; 0 = none.", ge=0)
    ] = 0
    compile: Annotated[bool, about("Compile layers by torch.compile. The first step takes minutes.")] = False
    liger: Annotated[bool, about("Use the kernels of liger-kernel, but not their loss. Needs a CUDA GPU.")] = False


@group_option
class AdapterOptions(OptionGroup, frozen=True, kw_only=True):
    """Adapters of --lora-rank, such as {"alpha": 32}."""

    alpha: Annotated[
        Annotated[float, Meta(gt=0)] | None, about("Adapters are scaled by alpha / rank. Default: 2 * rank.")
    ] = None
    targets: Annotated[tuple[str, ...], about("Linear layers with adapters. Default: all but the output layer.")] = ()


@group_option
class TablesOptions(OptionGroup, frozen=True, kw_only=True):
    """Files of --tables, such as {"keep": 100}."""

    dir: Annotated[str, about("Folder of the tables.", min_length=1)] = ".replaybuf/tables"
    keep: Annotated[Positive, about("Number of newest steps whose tables stay.")] = 20
