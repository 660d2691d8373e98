"""Types of loss options with their bounds."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
