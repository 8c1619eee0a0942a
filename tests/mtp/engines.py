"""Where inference engines put the head's tensors, by name: as data for the tests, and as their own
loaders do it.

    pip download --no-deps vllm sglang
    python -m tests.mtp.engines vllm-*.whl sglang-*.whl

reads the loading functions out of wheels, which need not be installed, runs them on the names of
saved heads, and fails where one is put elsewhere than the data says. Read: vLLM 0.33.0, SGLang
0.5.23.
"""

from __future__ import annotations
import __future__

import ast
import logging
import re
import sys
import zipfile
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from tests.mtp.names import DENSE, FUSED, PER_EXPERT

EXPERTS = 4
Placed = set[tuple[str, Any]]
"""Pairs of an engine's parameter and the part of it that a tensor fills: None, "q", 0, or ("w1",
3) for an expert's.
"""

ENGINES = {"vllm": "model.", "sglang": ""}
"""What the modules beside the layers are called below; SGLang also leaves `self_attn` out of
attention's names.
"""
HEADS = {
    "vllm": {"dense": DENSE, "fused": FUSED, "per expert": PER_EXPERT},
    "sglang": {"dense": DENSE, "fused": FUSED, "per expert": PER_EXPERT},
    # the family's only layout; fused experts are an error there
    "sglang, Qwen3-Next": {"per expert": PER_EXPERT},
}
_STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_OF_AN_EXPERT = {
    "gate_proj": ("w13_weight", "w1"),
    "up_proj": ("w13_weight", "w3"),
    "down_proj": ("w2_weight", "w2"),
}


def placed(engine: str, name: str) -> Placed:
    """Return what a saved tensor fills."""
    first = ENGINES[engine.partition(",")[0]]
    new = re.sub(r"^mtp\.(fc|pre_fc)", rf"{first}\1", name)
    new = re.sub(r"^mtp\.", "model.", new)
    if not first:
        new = new.replace(".self_attn.", ".")
    if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", new):
        parameter, shard = _OF_AN_EXPERT[match[3]]
        return {(f"{match[1]}.{parameter}", (shard, int(match[2])))}
    if match := re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", new):
        kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        return {
            (f"{match[1]}.{_OF_AN_EXPERT[kind][0]}", (_OF_AN_EXPERT[kind][1], number))
            for kind in kinds
            for number in range(EXPERTS)
        }
    before, _, kind = new.removesuffix(".weight").rpartition(".")
    stacked, shard = _STACKED.get(kind, (kind, None))
    return {(f"{before}.{stacked}.weight".lstrip("."), shard)}


def parameters(engine: str, experts: bool) -> Placed:
    """Return everything of the engine's head that a checkpoint has to fill; embedding and
    lm_head are the model's.
    """
    first = ENGINES[engine.partition(",")[0]]
    attention = "model.layers.0.self_attn." if first else "model.layers.0."
    mlp = "model.layers.0.mlp."
    plain = {
        f"{first}{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    } | {"model.norm.weight"}
    plain |= {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    plain |= {f"{attention}{name}.weight" for name in ("o_proj", "q_norm", "k_norm")}
    found: Placed = {(f"{attention}qkv_proj.weight", shard) for shard in "qkv"}
    dense = f"{mlp}shared_expert." if experts else mlp
    found |= {(f"{dense}gate_up_proj.weight", shard) for shard in (0, 1)}
    plain |= {f"{dense}down_proj.weight"}
    if experts:
        plain |= {f"{mlp}gate.weight", f"{mlp}shared_expert_gate.weight"}
        found |= {
            (f"{mlp}experts.{parameter}", (shard, number))
            for parameter, shard in _OF_AN_EXPERT.values()
            for number in range(EXPERTS)
        }
    return found | {(name, None) for name in plain}


def main() -> int:
    """Compare, and say what differs."""
    wrong = 0
    for wheel in sys.argv[1:]:
        for engine, heads in HEADS.items():
            if not wheel.rpartition("/")[2].startswith(engine.partition(",")[0]):
                continue
            for layout, names in heads.items():
                found = (_vllm if engine == "vllm" else _sglang)(wheel, engine, sorted(names))
                wanted = set().union(*(placed(engine, name) for name in names))
                wrong += found != wanted
                print(
                    engine,
                    layout,
                    "as written down"
                    if found == wanted
                    else f"differs: {sorted(map(str, found ^ wanted))}",
                )
    return wrong


def _sglang(wheel: str, engine: str, names: list[str]) -> Placed:
    following = "," in engine
    file, kind = (
        ("qwen3_next", "Qwen3NextForCausalLM")
        if following
        else ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP")
    )
    layer = _read(
        wheel,
        "sglang/srt/layers/moe/fused_moe_triton/layer.py",
        "FusedMoE.make_expert_params_mapping",
    )
    mapping = _run([layer])["make_expert_params_mapping"]
    known = SimpleNamespace(
        make_expert_params_mapping=lambda **given: mapping.__func__(None, **given)
    )
    space = {
        "FusedMoE": known,
        "_use_aiter": False,
        "QWEN3_5_KV_SCALE_MAPPER": SimpleNamespace(apply=iter),
        "Set": set,
        "logger": SimpleNamespace(warning_once=_refuse),
        "default_weight_loader": None,
    }
    load = _run([_read(wheel, f"sglang/srt/models/{file}.py", f"{kind}.load_weights")], space)[
        "load_weights"
    ]
    experts = any(".experts." in name for name in names)
    filled: Placed = set()
    targets = {name: _target(name, filled) for name, _ in parameters("sglang", experts)}
    config = SimpleNamespace(num_experts=EXPERTS if experts else None)
    model = SimpleNamespace(
        named_parameters=targets.items,
        modules=list,
        config=config,
        enable_shared_expert_fusion=False,
    )
    load(model, ((name, _tensor(name)) for name in names), is_mtp=True)
    return filled


def _vllm(wheel: str, engine: str, names: list[str]) -> Placed:
    models, seen = "vllm/model_executor/models", []
    space = _run([_read(wheel, f"{models}/utils.py", "WeightsMapper")])
    space["AutoWeightsLoader"] = lambda model: SimpleNamespace(load_weights=seen.extend)
    head = _run(
        [
            _read(wheel, f"{models}/qwen3_5_mtp.py", f"Qwen3_5MTP.{name}")
            for name in ("load_weights", "is_unused_checkpoint_weight")
        ],
        space,
    )
    model = SimpleNamespace(
        is_unused_checkpoint_weight=lambda name: head["is_unused_checkpoint_weight"](None, name)
    )
    head["load_weights"](model, ((name, _tensor(name)) for name in names))
    for file, kind in (("qwen3_next", "Qwen3NextModel"), ("qwen3_5", "Qwen3_5Model")):
        node = _read(wheel, f"{models}/{file}.py", f"{kind}.hf_to_vllm_mapper")
        space[kind] = SimpleNamespace(hf_to_vllm_mapper=_run([node], space)["hf_to_vllm_mapper"])
    filled: Placed = set()
    experts = []
    for name, tensor in seen:
        new, shard = space["Qwen3_5Model"].hf_to_vllm_mapper._map_name_with_shard(
            name.removeprefix("model.")
        )
        if ".experts." in new:
            experts.append((new.partition(".experts.")[2], tensor))
        else:
            filled.add((f"model.{new}", shard))
    return filled | _vllm_experts(wheel, experts)


def _vllm_experts(wheel: str, experts: list[tuple[str, torch.Tensor]]) -> Placed:
    names = (
        "load_weights",
        "get_expert_mapping",
        "build_expert_params_mapping",
        "_orient_fused_weight",
    )
    file, filled = "vllm/model_executor/layers/fused_moe/routed_experts.py", set()
    eplb = SimpleNamespace(
        build_initial_global_physical_to_logical_map=lambda count, more: list(range(count))
    )
    space = {"EplbState": eplb, "logger": logging.getLogger(), "FusedMoeWeightScaleSupported": None}
    nodes = [
        _read(wheel, file, "_index_expert_mapping"),
        *(_read(wheel, file, f"RoutedExperts.{name}") for name in names),
    ]
    methods = _run(nodes, space)
    where = "model.layers.0.mlp.experts"
    layer = type("Layer", (), {name: methods[name] for name in names})()
    vars(layer).update(
        {name: _target(f"{where}.{name}", filled) for name in ("w13_weight", "w2_weight")}
    )
    vars(layer).update(
        layer_name=where,
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        lora_base_layer_prefix="",
        is_fused_checkpoint_transposed=False,
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=0),
        moe_config=SimpleNamespace(
            num_experts=EXPERTS, num_logical_experts=EXPERTS, is_act_and_mul=True
        ),
    )
    list(layer.load_weights(experts))
    return filled


def _target(name: str, filled: Placed) -> Any:
    """Return a parameter that notes what it is given."""

    def load(
        param: Any,
        loaded_weight: Any,
        *rest: Any,
        shard_id: Any = None,
        expert_id: Any = None,
        **more: Any,
    ) -> bool:
        if len(rest) == 3:
            _, shard_id, expert_id = rest
        elif rest and shard_id is None:
            (shard_id,) = rest
        filled.add((name, shard_id if expert_id is None else (shard_id, expert_id)))
        return True

    return SimpleNamespace(weight_loader=load)


def _tensor(name: str) -> torch.Tensor:
    return (
        torch.zeros(EXPERTS, 4, 4)
        if re.search(r"experts\.(gate_up|down)_proj$", name)
        else torch.zeros(4, 4)
    )


def _refuse(said: str) -> None:
    raise AssertionError(said)


def _read(wheel: str, file: str, path: str) -> ast.stmt:
    """Return a definition of a file, by its dotted name."""
    node: Any = ast.parse(zipfile.ZipFile(wheel).read(file))
    for part in path.split("."):
        node = next(one for one in node.body if part in _names(one))
    return node


def _names(node: Any) -> Iterable[str]:
    return (
        [target.id for target in node.targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign)
        else [getattr(node, "name", "")]
    )


def _run(nodes: list[ast.stmt], space: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run definitions with the names that they read."""
    space = {} if space is None else space
    exec("from dataclasses import dataclass, field\nimport re\nimport torch", space)
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(nodes, []), "wheel", "exec", flags), space)
    return space


if __name__ == "__main__":
    sys.exit(main())
