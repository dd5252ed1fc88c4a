"""Config keys with which AutoRound describes how it tuned a checkpoint; its exports to other formats have them too."""

TUNING_KEYS = frozenset(
    {
        "autoround_version", "batch_size", "dataset", "iters", "nsamples", "seqlen", "lr", "minmax_lr",
        "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_quanted_input", "scale_dtype", "enable_minmax_tuning",
        "enable_norm_bias_tuning", "gradient_accumulate_steps", "amp", "seed", "sampler", "damp_percent",
        "true_sequential", "lm_head", "quant_lm_head", "version", "provider",
    }
)  # fmt: skip

# What else it writes beside FP8, where the tensors say the same.
AUTO_ROUND_KEYS = TUNING_KEYS | {
    "bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic",
    "block_name_to_quantize", "extra_config",
}  # fmt: skip
