"""Types shared by the settings of [privacy]."""

from typing import Annotated, Literal

from pydantic import Field

ClipNorm = Annotated[float, Field(gt=0)]
NoiseMultiplier = Annotated[float, Field(ge=0)]  # 0 means no noise and no privacy
Delta = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Sampling = Literal["secret", "public"]
