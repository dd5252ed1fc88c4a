"""The entry point of `vllm.general_plugins`. vLLM calls it in the API server, the engine core and every worker."""

from __future__ import annotations

import logging
import os

from lancebill.errors import SpecError

PLUGIN = "lancebill"  # its name as an entry point
SWITCH = "LANCEBILL_VLLM"  # "off" leaves vLLM alone, like VLLM_PLUGINS without "lancebill"
OFF_WORDS = ("off", "0")
REGISTERED = "require"  # a value of the switch: vLLM does not start without the plugin
ALLOWED = "VLLM_PLUGINS"  # vLLM's own list of the plugins that it loads; if not set, all
OPERATOR = "RoutedExperts"


def register() -> None:
    """Offer lancebill to vLLM. A failure here is one warning: vLLM then runs as if lancebill were not installed.

    Where LANCEBILL_VLLM is "require", it is an error.
    """
    switch = os.environ.get(SWITCH, "on").lower()
    if switch in OFF_WORDS:
        return
    try:
        _register()
    except Exception as error:
        if switch == REGISTERED:
            raise
        logging.getLogger("vllm.lancebill").warning("lancebill is not used: %s: %s", type(error).__name__, error)


def environment(*, required: bool) -> dict[str, str]:
    """The variables for a server that is started here. Raises where they keep a required plugin from registering."""
    given = dict(os.environ)
    if not required:
        return given
    off = given.get(SWITCH, "on").lower() in OFF_WORDS
    if off or PLUGIN not in given.get(ALLOWED, PLUGIN).split(","):
        name = SWITCH if off else ALLOWED
        hint = f"unset {name}, or --engine transformers"
        raise SpecError("this keeps lancebill out of vLLM", where=name, got=repr(given[name]), hint=hint)
    return {**given, SWITCH: REGISTERED}


def _register() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    from lancebill.integrations.vllm.hooks import check_hooks, check_version

    if OPERATOR in op_registry_oot:
        return  # registered before in this process
    check_version()
    check_hooks()
    from lancebill.integrations.vllm.cpu_collectives import add_cpu_collectives
    from lancebill.integrations.vllm.dense_config import register_dense_config
    from lancebill.integrations.vllm.experts import adopt_layer_classes, register_operator
    from lancebill.integrations.vllm.gguf import register_gguf
    from lancebill.integrations.vllm.models import divert_models
    from lancebill.integrations.vllm.registration import all_or_nothing, changed_attributes, changed_containers
    from lancebill.integrations.vllm.reloads import follow_reloads, refuse_sparse_patches
    from lancebill.integrations.vllm.saving import refuse_incomplete_saves

    with all_or_nothing(changed_containers(), changed_attributes()):
        register_operator()  # cannot be undone, and does nothing alone
        add_cpu_collectives()
        register_gguf()
        follow_reloads()
        refuse_sparse_patches()
        refuse_incomplete_saves()
        adopt_layer_classes()
        divert_models()
        register_dense_config()  # last: the checkpoints that it claims need everything else
