"""Config keys with which AutoRound describes how it tuned a checkpoint; its exports as GPTQ and AWQ have them too."""

TUNING_KEYS = frozenset(
    {
        "autoround_version", "batch_size", "dataset", "iters", "nsamples", "seqlen", "lr", "minmax_lr",
        "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_quanted_input", "scale_dtype", "enable_minmax_tuning",
        "enable_norm_bias_tuning", "gradient_accumulate_steps", "amp", "seed", "sampler", "damp_percent",
        "true_sequential", "lm_head", "quant_lm_head", "version", "provider",
    }
)  # fmt: skip
