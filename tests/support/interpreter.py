"""Triton's interpreter without most of its time.

It exchanges the functions of `triton.language` when a kernel starts and again at every call of a
helper; it computes every sum and product of integers again in 64 bits, for an assertion that it
then leaves out; it writes its table of dtypes anew for each value; and it checks and wraps the
shape of each value, of which a kernel has few.
"""

import operator
from dataclasses import replace

from triton.language import core
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Exchange functions once a launch, leave out the arithmetic of absent assertions, keep tables and shapes."""
    patch_once_a_launch()
    keep_shapes()
    interpreter._patch_attr = call_directly
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # else overflows would raise
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up, known = interpreter._get_np_dtype, {}
    interpreter._get_np_dtype = lambda dtype: (
        known.get(dtype.name) or known.setdefault(dtype.name, look_up(dtype))
    )


def call_directly(owner, name, builtin, builder, scope) -> None:
    """Exchange a function for what the interpreter calls in the end, which has neither checks nor copies between."""
    function, semantic = (
        getattr(builtin, "__wrapped__", builtin),
        {"_semantic": interpreter.interpreter_semantic},
    )
    scope.set_attr(
        owner, name, lambda *arguments, **options: function(*arguments, **options | semantic)
    )


def keep_shapes() -> None:
    """Give values and types of one shape the same, which was checked and wrapped once."""
    make_type, make_value, known = core.block_type.__init__, core.tensor.__init__, {}
    scalar = core.tensor(None, core.int32)

    def make_known_type(block, element_ty, shape):
        key = tuple(map(operator.index, shape))
        if key not in known:
            make_type(block, element_ty, shape)
            make_value(value := core.tensor.__new__(core.tensor), None, block)
            known[key] = block.shape, block.numel, value
        block.element_ty, (block.shape, block.numel, block.value) = element_ty, known[key]
        block.name = f"<{key}, {element_ty}>"

    def make_known_value(value, handle, type):
        like = type.value if type.is_block() else scalar
        value.handle, value.type, value.dtype = handle, type, type.scalar
        value.shape, value.numel = like.shape, like.numel

    core.block_type.__init__, core.tensor.__init__ = make_known_type, make_known_value


def patch_once_a_launch() -> None:
    """Exchange the functions at a kernel's start, and for helpers only those of modules that the launch has not met."""
    patch, met = interpreter._patch_lang, []

    def patch_unmet(function):
        names = function.__globals__
        if any(names is others for others in met):
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not met:  # the kernel itself, whose scope ends with the launch
            restore = scope.restore
            scope.restore = lambda: (met.clear(), restore())
        met.append(names)
        return scope

    interpreter._patch_lang = patch_unmet
