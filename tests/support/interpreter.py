"""Triton's interpreter without half of its time.

It exchanges the functions of `triton.language` when a kernel starts and again at every call of a helper; it computes
every sum and product of integers again in 64 bits, for an assertion that it then leaves out; and it writes its table of
dtypes anew for each value.
"""

from dataclasses import replace

from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Exchange functions once a launch, leave out the arithmetic of absent assertions, and keep the table of dtypes."""
    patch_once_a_launch()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # else overflows would raise
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up, known = interpreter._get_np_dtype, {}

    def look_up_once(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up_once


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
