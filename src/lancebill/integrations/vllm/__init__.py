"""The routed experts of vLLM's models, computed by lancebill: a plugin of the group `vllm.general_plugins`.

`plugin.register` is the entry point. `settings` and `placement` need no vLLM; everything else imports it.
"""
