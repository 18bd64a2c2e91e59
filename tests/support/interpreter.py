"""Triton's interpreter without its repetitions.

It exchanges the functions of `triton.language` when a kernel starts and again at every call of a helper: half of the
time of a small kernel.
"""

from triton.runtime import interpreter


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
