"""The dtype in which a checkpoint's linear layers compute, by its config, and whether they are
fused in that dtype.
"""

from __future__ import annotations

from typing import Any

from hf_packfree.patching.family import Family
from hf_packfree.patching.report import NOT_FUSED


def linear_layers(config: Any, family: Family) -> str:
    """Say in which dtypes a checkpoint's linear layers, and LoRA on them, run in fused kernels.

    A QLoRA trainer quantises a checkpoint by a config of its own, which is not known here.

    Args:
        config: transformers', with `quantization_config` if the checkpoint is quantised.
        family: the checkpoint's.
    """
    if not family.fused_parts:
        return NOT_FUSED
    of = "" if family.fuses_all else f" of {', '.join(family.fused_parts)}"
    which = f"linear layers{of}"
    quantised = _fields(getattr(config, "quantization_config", None))
    if not quantised:
        return f"{which} {_plain(_dtype_of(config))}"
    if quantised.get("load_in_4bit"):
        computes_in = _name(quantised.get("bnb_4bit_compute_dtype")) or "float32"
        return f"{which} in 4 bits (bnb_4bit_compute_dtype={computes_in}) {_in_4_bits(computes_in)}"
    method = _name(quantised.get("quant_method")) or "an unknown method"
    return (
        f"{which} are fused, but not those that are quantised by {method} (bitsandbytes' 4 bits "
        "would be): these are called as they are, with their LoRA"
    )


def _plain(dtype: str | None) -> str:
    found = f"in {dtype}, the config's dtype," if dtype else "in the dtype of its files"
    advice = (
        "; load it with dtype=torch.bfloat16, or train under autocast (bf16=True), as TRL does: "
        "in float32 kernels are slower, or none"
        if dtype == "float32"
        else ""
    )
    return f"are fused {found} and under autocast in autocast's{advice}"


def _in_4_bits(computes_in: str) -> str:
    otherwise = "elsewhere they are called as they are"
    if computes_in == "float32":
        return (
            "are fused where activations and adapters are float32 (TRL makes these bfloat16) and "
            f"autocast is off; {otherwise}, also under TRL's autocast (bf16=True): load it with "
            "bnb_4bit_compute_dtype=torch.bfloat16"
        )
    flag = {"bfloat16": " (bf16=True)", "float16": " (fp16=True)"}.get(computes_in, "")
    return (
        f"are fused under autocast in {computes_in}{flag}, and without it where activations are "
        f"{computes_in}, which prepare_model_for_kbit_training makes float32; {otherwise}"
    )


def _dtype_of(config: Any) -> str | None:
    """Return the dtype that the config names for the text model, or else for the whole model."""
    text = config.get_text_config(decoder=True)
    return _name(getattr(text, "dtype", None) or getattr(config, "dtype", None))


def _fields(quantisation: Any) -> dict[str, Any]:
    """Return a quantization_config, a dict or an object, as a dict."""
    if quantisation is None or isinstance(quantisation, dict):
        return quantisation or {}
    found: dict[str, Any] = quantisation.to_dict()
    return found


def _name(value: Any) -> str | None:
    """Return "bfloat16" of torch.bfloat16, "torch.bfloat16" or "bfloat16", "fp8" of an enumeration
    of that value; None of None.
    """
    value = getattr(value, "value", value)
    return None if value is None else str(value).removeprefix("torch.")
