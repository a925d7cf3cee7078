# mypy: ignore-errors
"""Start-up code of every Python under `ds-ckpt exec`: adds the plugin to `deepspeed.initialize`.

Pythons of other environments run this file, too, so it imports only `sys`. This folder is first on
PYTHONPATH: another file in it would hide a module of the user.
"""

import sys


def _wrap_initialize(deepspeed):
    stock = getattr(deepspeed, "initialize", None)
    if stock is None or getattr(stock, "__ds_ckpt__", None) is stock:
        return
    import functools

    @functools.wraps(stock)
    def initialize(*args, **kwargs):
        try:
            from ds_ckpt.engine.entry import initialize_installed
        except ModuleNotFoundError as error:
            if error.name != "ds_ckpt":
                raise
            sys.stderr.write(f"ds_ckpt is not installed in {sys.prefix}: plain DeepSpeed\n")
            return stock(*args, **kwargs)
        return initialize_installed(stock, args, kwargs)

    initialize.__ds_ckpt__ = initialize  # another library's functools.wraps copies the attribute
    deepspeed.initialize = initialize
    try:
        from ds_ckpt.environment import clear_stale_locks

        clear_stale_locks()
    except ModuleNotFoundError:
        pass


def _exempt_section(dataclasses):
    """Keep accelerate from refusing each "auto" of the `ds_ckpt` section."""
    plugin = getattr(dataclasses, "DeepSpeedPlugin", None)
    stock = getattr(plugin, "fill_match", None)
    if stock is None or stock.__module__ == __name__:
        return

    def fill_match(self, ds_key_long, *args, **kwargs):
        if ds_key_long.partition(".")[0] != "ds_ckpt":
            stock(self, ds_key_long, *args, **kwargs)

    plugin.fill_match = fill_match


_AFTER = {"deepspeed": _wrap_initialize, "accelerate.utils.dataclasses": _exempt_section}


class DsCkptFinder:
    """Finds no module itself; calls the function in `_AFTER` once the module's body has ended."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of the other finders, its loader extended."""
        others = sys.meta_path if name in _AFTER else ()
        specs = (finder.find_spec(name, path, target) for finder in others if finder is not self)
        spec = next(filter(None, specs), None)
        run = getattr(getattr(spec, "loader", None), "exec_module", None)
        if run is not None:

            def exec_module(module):
                run(module)
                if module.__name__ == name:  # one loader may serve several modules
                    _AFTER[name](module)

            spec.loader.exec_module = exec_module
        return spec


def install():
    """Patch the modules in `_AFTER`: imported ones now, the others once they are imported."""
    for name in _AFTER.keys() & sys.modules.keys():
        _AFTER[name](sys.modules[name])
    if all(type(finder).__name__ != "DsCkptFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, DsCkptFinder())


if __name__ == "sitecustomize":
    install()
    # Python runs one sitecustomize, the first of the path: go on to the next one.
    here = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") != here]
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own
