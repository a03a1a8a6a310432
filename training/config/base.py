"""What all sections of the configuration are built from: the base class and the number types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
# Not strict: YAML 1.1 readers hand over "5e-5" as a string.
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def lower_case(value: Any) -> Any:
    """Lets a choice be written as the field writes it (AdamW, NCCL)."""
    return value.lower() if isinstance(value, str) else value


class Section(BaseModel):
    """Base of all sections: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
