"""The base of all classes that replace upstream's, and the checkpoint contract that these classes
depend on.

The contract: the parameters and sizes that every checkpoint of a family has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from inspect import isclass, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from hf_packfree.models.state import PatchState

_Class = TypeVar("_Class", bound="type[Replacement]")


class _Absent:
    """An attribute that upstream's class has and a patched class must not have: `hasattr` is False
    for the class and its instances.
    """

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("not of a patched class")


class Replacement(nn.Module):
    """Base of the mixins that patched classes put in front of upstream's.

    transformers decides by a class's name and module which weight conversions, output recorders and
    attention settings apply; FSDP and accelerate decide by a class's name which layers to wrap. A
    replacement therefore has upstream's name and module, and keeps the name of its own module in
    `packfree_home`, for pickling.
    """

    packfree: ClassVar[PatchState | None] = None
    packfree_home: ClassVar[str] = ""
    upstream: ClassVar[Any] = None
    """The modeling module of upstream's class."""
    endings: ClassVar[tuple[str, ...]] = ()
    """The endings of the names of upstream's classes that the mixin is put in front of, see
    `classes_of`.
    """
    inputs: ClassVar[tuple[str, ...]] = ()
    """The names of the linear layers that read the module's input, all that do."""
    joins_inputs: ClassVar[bool] = True
    """Whether the packed branch runs `inputs` as one product."""
    norm_offset: ClassVar[float | None] = None
    """What the RMS norms of the modeling module add to their weight; None: no kernel computes
    them.
    """
    follows_trees: ClassVar[bool] = False
    """Whether a token mixer follows each segment's path in a tree of shared prefixes."""
    positional_names: ClassVar[tuple[str, ...]] = ()
    """The names of the positional parameters of upstream's forward, in which releases differ."""
    attends_for: ClassVar[tuple[str, ...]] = ("sdpa",)
    """The attention implementations in whose place an attention layer runs our operation."""
    kernel_layer_name = _Absent()
    """`kernelize` replaces, on each train() and eval(), the forward of every instance whose class
    has this attribute.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class in front of upstream's the signature of upstream's forward, by which
        trainers and tools choose the arguments that they pass.
        """
        owner: Any = next(base for base in cls.__mro__ if "forward" in vars(base))
        upstream: Any = upstream_of(cls)
        if upstream is not nn.Module:
            found = list(signature(upstream.forward).parameters.values())[1:]
            cls.positional_names = tuple(
                each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD
            )
            if issubclass(owner, Replacement) and upstream_of(owner) is nn.Module:
                cls.forward = _showing(vars(owner)["forward"], upstream.forward)
        # transformers' GradientCheckpointingLayer wraps the forward that the class has at this
        # point
        super().__init_subclass__(**kwargs)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a forward by upstream's names; None if there are too many or one
        is given twice, for which upstream's forward raises.
        """
        named = dict(zip(self.positional_names, args)) | kwargs
        return named if len(named) == len(args) + len(kwargs) else None

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the sizes of a layer, patched or not, by which backends decide whether they run
        it; see `Target.sizes`.
        """
        return {}

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls the child `name` for inputs like x, instead of reading
        the child's weights.

        For a called module it is unknown how the output is rounded.
        """
        return True

    # mypy knows no attributes of upstream's classes
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by `packfree_home`, the module where the class can be imported."""
        return _blank, (self.packfree_home, type(self).__qualname__), self.__dict__


@cache
def is_transformers_own(forward: Any) -> bool:
    """Whether a forward is transformers' own, with decorators of transformers alone: nobody
    replaced or wrapped it.
    """
    while forward is not None:
        if not getattr(forward, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def upstream_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Return upstream's class that a replacement is in front of: `nn.Module` for a mixin."""
    # FSDP puts a class that is no nn.Module in front
    return next(
        base
        for base in cls.__mro__
        if issubclass(base, nn.Module) and not issubclass(base, Replacement)
    )


def _showing(forward: FunctionType, upstream: Any) -> FunctionType:
    """Return a copy of `forward` with upstream's signature and annotations; unlike a wrapper, a
    copy adds no frame to a call.
    """
    parts = (
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy: Any = FunctionType(*parts)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (
        forward.__kwdefaults__,
        forward.__doc__,
        forward.__qualname__,
    )
    copy.__module__, copy.__annotations__ = forward.__module__, upstream.__annotations__
    copy.__signature__ = signature(upstream)
    shown: FunctionType = copy
    return shown


def stands_for(upstream: Any) -> Callable[[_Class], _Class]:
    """Return a decorator that gives a replacement the modeling module `upstream` as its
    `__module__`.
    """

    def rename(cls: _Class) -> _Class:
        cls.packfree_home, cls.__module__ = cls.__module__, upstream.__name__
        cls.upstream = upstream
        return cls

    return rename


_Mixin = type[Replacement]


def classes_of(upstream: Any, home: str, *mixins: _Mixin) -> dict[str, _Mixin]:
    """Return {name: our class} for the classes of the modeling module `upstream` whose names have
    an ending of one of the mixins. The longest ending decides; if several mixins have that ending,
    the last of these mixins.
    """
    chosen = {
        cls: mixin_for(name, mixins)
        for name, cls in _defined_in(upstream).items()
        if not name.endswith("PreTrainedModel")
    }
    return put_in_front(upstream, home, {cls: mixin for cls, mixin in chosen.items() if mixin})


def _defined_in(upstream: Any) -> dict[str, type[nn.Module]]:
    """Return {name: class} for the modules' classes that the modeling module `upstream` defines,
    also where the name there is another class at present, as with Liger's.
    """
    found: dict[str, type[nn.Module]] = {}
    left, seen = [nn.Module], set[type[nn.Module]]()
    while left:
        subclasses = {*left.pop().__subclasses__()} - seen
        seen |= subclasses
        left += subclasses
        found |= {cls.__name__: cls for cls in subclasses if _is_of(upstream, cls)}
    # of a module that was imported twice, the classes that it has now
    return found | {name: cls for name, cls in vars(upstream).items() if _is_of(upstream, cls)}


def _is_of(upstream: Any, cls: Any) -> bool:
    return (
        isclass(cls)
        and issubclass(cls, nn.Module)
        and cls.__module__ == upstream.__name__
        and not issubclass(cls, Replacement)
    )


def mixin_for(name: str, mixins: Iterable[_Mixin]) -> _Mixin | None:
    """Return which of `mixins` is put in front of a class of that name, see `classes_of`, or
    None.
    """
    by_ending = {ending: mixin for mixin in mixins for ending in mixin.endings}
    fitting = (ending for ending in by_ending if name.endswith(ending))
    return by_ending.get(max(fitting, key=len, default=""))


def put_in_front(
    upstream: Any, home: str, mixins: Mapping[type[nn.Module], _Mixin]
) -> dict[str, _Mixin]:
    """Return {name: our class} for classes of the modeling module `upstream`, each a subclass of a
    mixin and upstream's class.

    Args:
        home: where pickling finds our classes: see `replacements`.
        mixins: {upstream's class: mixin}.
    """
    made: dict[str, _Mixin] = {}
    for cls, mixin in mixins.items():
        fields = {"__module__": home, "__doc__": mixin.__doc__}
        made[cls.__name__] = stands_for(upstream)(type(cls.__name__, (mixin, cls), fields))
    return made


def replacements(home: str) -> Mapping[str, Any]:
    """Return {name: value} of a module of ours, its patched classes among them. If `home` is
    "module:upstream", return the result of the module's function `replacements` for the modeling
    module `upstream`.
    """
    name, _, upstream = home.partition(":")
    module = import_module(name)
    return module.replacements(upstream) if upstream else vars(module)


def _blank(home: str, name: str) -> Any:
    cls = replacements(home)[name]
    return cls.__new__(cls)


Sizes = dict[str, tuple[Any, Any]]
"""{name of a part: (the size that the module has, the size that its config says)}; also of what is
no size, such as an activation.
"""


def kinds_of_layers(config: Any) -> list[str]:
    """Return the kind of each decoder layer; a config that does not name them has one kind."""
    layers: int = config.num_hidden_layers
    # hybrids have `layers_block_type` before transformers 5.5
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(kinds or ["full_attention"] * layers)[:layers]


def part_at(layer: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a dotted path in a decoder layer, None where there is none."""
    for name in path.split("."):
        layer = getattr(layer, name, None)  # type: ignore[assignment]
    return layer


def size_of_linear(layer: Any) -> tuple[int, int]:
    """Return (out_features, in_features), which adapters and quantised layers keep while the shapes
    of their weights change.
    """
    return layer.out_features, layer.in_features


def size_of_norm(norm: Any) -> tuple[int, ...]:
    """Return the shape of the norm's weight."""
    return size_of(norm.weight)


def size_of(parameter: Any) -> tuple[int, ...]:
    """Return the whole shape of a parameter; a parameter sharded by DeepSpeed's ZeRO-3 is empty,
    and has its whole shape in `ds_shape`.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def silu(activation: Any) -> tuple[Any, Any]:
    """Return the name of a layer's activation, and the name that it has to have: silu's, which
    transformers also calls swish.
    """
    return activation, activation if activation in ("silu", "swish") else "silu"


def contract_violations(layer: nn.Module, sizes_of: Callable[[Any], Sizes]) -> list[str]:
    """Return a sentence for each part of `layer` that is missing or whose size differs from the
    config's.
    """
    try:
        sizes = sizes_of(layer)
    except AttributeError as missing:
        return [str(missing)]
    return [
        f"{part} is {found} instead of {wanted}"
        for part, (found, wanted) in sizes.items()
        if found != wanted
    ]
