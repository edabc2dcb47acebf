"""Names of settings in TRL, OpenRLHF and verl, and the key of this project for each.

The table serves the suggestions of error messages and docs/coming_from.md. The names are those of TRL 1.16,
OpenRLHF 0.11 and verl 0.9, and names of earlier versions. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlhf.core.pasting import as_typed

PROJECTS = ("TRL", "OpenRLHF", "verl")
OTHERS = "other programs"
WITHOUT = "-"  # in place of a key: this project has no such setting


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of other projects.

    Attributes:
        key: the key or group of this project; `WITHOUT`: there is none, and `note` says what to do.
        names: the names in each of `PROJECTS`, with blanks between them; the first is the current name.
        note: what differs; `<value there>: <value here>` for values that differ.
        value: the value here; None: the value there; `<value>`: it must be converted.
        others: names of `OTHERS`, with blanks between them.
    """

    key: str
    names: tuple[str, str, str]
    note: str = ""
    value: str | None = None
    others: str = ""

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each name with the project that uses it."""
        for project, names in zip((*PROJECTS, OTHERS), (*self.names, self.others), strict=True):
            for name in names.split():
                yield name, project

    def setting(self, value: str) -> str:
        """Return the assignment here for a value there."""
        meant = dict(re.findall(r"([\w-]+): ([\w-]+)", self.note)).get(value)
        return as_typed(self.key, meant or self.value or value or "<value>")


# key here | TRL | OpenRLHF | verl (without actor_rollout_ref.) | value here | remark
TEXT = """
model.policy | model_name_or_path model sft_model_path | actor.model_name_or_path pretrain | model.path |
    | model.base for SFT
model.reference | ref_model ref_model_name_or_path | ref.model_name_or_path ref_pretrain
model.reward | reward_model_path | reward.model_name_or_path reward_pretrain | reward_model.model.path
model.tokenizer | tokenizer_name |  | model.tokenizer_path
model.chat_template | chat_template_path | data.tokenizer_chat_template | model.custom_chat_template |  |
    a file
model.dtype | torch_dtype dtype | ds.param_dtype param_dtype | rollout.dtype
model.dtype | bf16 | bf16 |  | bfloat16
model.dtype | fp16 |  |  | float16
model.lora.rank | lora_r r | ds.lora.rank lora_rank | model.lora_rank
model.lora.alpha | lora_alpha | ds.lora.alpha lora_alpha | model.lora_alpha
model.lora.targets | lora_target_modules target_modules | ds.lora.target_modules target_modules |
    model.target_modules |  | a list; all-linear: null
model.lora.rank | use_peft |  |  | 16
model.lora.modules_to_save | lora_modules_to_save
- | load_in_4bit load_in_8bit use_bnb_nested_quant | ds.load_in_4bit load_in_4bit |  |  | base weights are
    not quantized; to save memory set model.lora.rank=16 model.dtype=bfloat16
- | lora_dropout | ds.lora.dropout lora_dropout |  |  | adapters have no dropout
model.gradient_checkpointing | gradient_checkpointing | actor.gradient_checkpointing_enable |
    model.enable_gradient_checkpointing
model.attention | attn_implementation | ds.attn_implementation flash_attn |
    model.override_config.attn_implementation
model.fused_head | use_liger_kernel use_liger_loss | ds.use_liger_kernel | model.use_liger
task.path | dataset_name dataset | data.prompt_dataset data.dataset prompt_data | data.train_files
    train_files |  | a file or folder, with task=local
task.columns.prompt | dataset_prompt_column | data.input_key data.prompt_key | data.prompt_key
task.columns.response |  | data.label_key output_key
task.columns.chosen |  | data.chosen_key
task.columns.rejected |  | data.rejected_key
task.template |  | data.input_template |  | <value> | with {query}, not {}
scorer.path | reward_funcs | reward.remote_url remote_rm_url | reward.custom_reward_function.path
    custom_reward_function.path | <value> | <file>.py:<function>, with scorer=function; of a service
    scorer.url, with scorer=http
task.max_prompt_tokens | max_prompt_length | prompt_max_len input_max_len | data.max_prompt_length
- | max_length max_seq_length | data.max_len | rollout.max_model_len |  | prompt and response have limits
    of their own: task.max_prompt_tokens and generator.response_length
algo.samples_per_prompt | num_generations | rollout.n_samples_per_prompt | rollout.n
generator.response_length | max_completion_length max_new_tokens | rollout.max_new_tokens generate_max_len
    | data.max_response_length rollout.response_length
generator.temperature | temperature | rollout.temperature | rollout.temperature
eval.temperature |  | eval.temperature | rollout.val_kwargs.temperature
generator | use_vllm | vllm.num_engines vllm_num_engines | rollout.name | vllm
generator | vllm_mode |  |  | vllm_colocated | server: vllm_server; colocate: vllm_colocated
generator |  | train.colocate_all |  | vllm_colocated
generator.urls | vllm_server_base_url |  |  |  | a list
generator.urls | vllm_server_host vllm_server_port |  |  | [http://127.0.0.1:8000] | host and port of each
    server
environment.functions | tools environment_factory |  |  |  | <file>.py:<function>, or <file>.py:<Class>
    whose public methods are tools
environment.path | rollout_func |  |  | <file>.py:<Class> | a class with reset(example) and step(reply)
environment.max_turns | max_tool_calling_iterations
generator.memory | vllm_gpu_memory_utilization | vllm.gpu_memory_utilization |
    rollout.gpu_memory_utilization
generator.tensor_parallel_size | vllm_tensor_parallel_size | vllm.tensor_parallel_size |
    rollout.tensor_model_parallel_size
generator.enforce_eager |  | vllm.enforce_eager | rollout.enforce_eager
generator.max_num_seqs |  |  | rollout.max_num_seqs
schedule.max_lag |  | train.async_enable train.async_queue_size async_queue_size | trainer.v1.trainer_mode
    async_training.staleness_threshold | <value> | batches sampled ahead; 0: synchronous
schedule.refill |  | dynamic_filtering | algorithm.filter_groups.enable filter_groups.enable
    algorithm.filter_groups.max_num_gen_batches | 9 | further batches of prompts, at most
schedule.prompts_per_update | generation_batch_size | rollout.batch_size rollout_batch_size |
    data.train_batch_size train_batch_size | <value> | prompts; TRL counts responses: divide by
    num_generations
schedule.minibatches | steps_per_generation num_mini_batches num_minibatches | train.batch_size |
    actor.ppo_mini_batch_size | <value> | number of optimizer steps of a pass, not a size
schedule.epochs | num_iterations num_ppo_epochs ppo_epochs | train.max_epochs max_epochs |
    actor.ppo_epochs
backend.micro_batch | per_device_train_batch_size | train.micro_batch_size micro_train_batch_size |
    actor.ppo_micro_batch_size_per_gpu ppo_micro_batch_size |  | sequences of one forward pass; the
    results do not depend on it
backend.micro_batch | gradient_accumulation_steps | gradient_accumulation_steps |
    gradient_accumulation_steps | <value> | sequences of one forward pass; the number of accumulation
    steps follows
backend.tokens |  | train.max_tokens_per_gpu | actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz |
    <value> | tokens of one forward pass; 0: as many as fit
schedule.total_episodes | max_steps total_steps | max_samples | trainer.total_training_steps
    total_training_steps | <value> | responses: updates x prompts_per_update x samples_per_prompt
schedule.total_epochs | num_train_epochs num_epochs | train.num_episodes num_episodes |
    trainer.total_epochs |  | passes over the data; null in total_episodes
schedule.eval_every | eval_steps | eval.steps | trainer.test_freq |  | updates; below 1: a fraction of the
    run
schedule.save_every | save_steps | ckpt.save_steps | trainer.save_freq |  | updates; below 1: a fraction
    of the run
schedule.log_every | logging_steps | logger.logging_steps |  |  | updates
save_total_limit | save_total_limit | ckpt.max_num max_ckpt_num | trainer.max_actor_ckpt_to_keep
output_dir | output_dir | ckpt.output_dir save_path | trainer.default_local_dir
resume | resume_from_checkpoint | ckpt.load_enable load_checkpoint | trainer.resume_mode | auto
seed | seed data_seed | train.seed | data.seed
logger | report_to | use_wandb | trainer.logger | wandb | wandb, tensorboard, mlflow or trackio
logger.wandb.project |  | logger.wandb.project wandb_project | trainer.project_name
push_to | hub_model_id push_to_hub |  |  | <value> | <owner>/<name>
optim.lr | learning_rate | actor.adam.lr adam.lr actor_learning_rate | actor.optim.lr
optim.schedule | lr_scheduler_type | actor.lr_scheduler lr_scheduler | actor.optim.lr_scheduler_type
optim.warmup | warmup_steps warmup_ratio | actor.lr_warmup_ratio lr_warmup_ratio |
    actor.optim.lr_warmup_steps actor.optim.lr_warmup_steps_ratio
optim.weight_decay | weight_decay | actor.adam.weight_decay l2 | actor.optim.weight_decay
optim.betas | adam_beta1 adam_beta2 |  |  | [0.9,0.999] | both in a list
optim.betas |  | actor.adam.betas adam_betas | actor.optim.betas |  | a list
optim.eps | adam_epsilon | actor.adam.eps
optim.max_grad_norm | max_grad_norm | actor.max_norm max_norm | actor.grad_clip actor.optim.clip_grad
optim.optimizer | optim | actor.optim | actor.optim.optimizer
algo.value_lr |  | critic.adam.lr critic_learning_rate | critic.optim.lr
algo |  | algo.advantage.estimator advantage_estimator | algorithm.adv_estimator adv_estimator | <value> |
    gae: ppo; group_norm: grpo; reinforce: rloo
algo.kl_coef | beta kl_beta init_kl_coef | algo.kl.init_coef init_kl_coef | actor.kl_loss_coef
    algorithm.kl_ctrl.kl_coef
algo.beta | beta | model.beta
algo.kl_in |  | algo.kl.use_loss use_kl_loss | actor.use_kl_loss | loss
algo.kl_in |  |  | algorithm.use_kl_in_reward | reward
algo.kl_estimator | kl_estimator | algo.kl.estimator | actor.kl_loss_type kl_penalty | <value> | k1 or k3
    (low_var_kl)
algo.kl_unbiased | use_bias_correction_kl | algo.kl.unbiased_gradient
algo.kl_target | target_kl | algo.kl.target kl_target | algorithm.kl_ctrl.target_kl
algo.kl_horizon | kl_horizon | algo.kl.horizon | algorithm.kl_ctrl.horizon
algo.clip_high | epsilon_high | actor.eps_clip_low_high | actor.clip_ratio_high
algo.clip_low | epsilon cliprange clip_range epsilon_low | actor.eps_clip eps_clip | actor.clip_ratio
    actor.clip_ratio_low |  | also set algo.clip_high
algo.dual_clip | delta | actor.dual_clip | actor.clip_ratio_c
algo.entropy_coef | entropy_coef ent_coef | actor.entropy_coef | actor.entropy_coeff
algo.scale | scale_rewards | algo.advantage.no_std_norm no_advantage_std_norm |
    algorithm.norm_adv_by_std_in_grpo | <value> | group, batch or none
algo | loss_type | actor.loss_agg_mode | actor.loss_agg_mode | <value> | token-mean: dapo;
    seq-mean-token-mean: grpo; seq-mean-token-sum-norm: dr_grpo
algo.correction.kind | vllm_importance_sampling_correction vllm_importance_sampling_mode |
    algo.advantage.is_correction_level enable_vllm_is_correction | algorithm.rollout_correction.rollout_is
    tis_imp_ratio_cap | <value> | truncate, mask or decoupled
algo.correction.cap | vllm_importance_sampling_clip_max vllm_importance_sampling_cap |
    algo.advantage.is_correction_threshold | algorithm.rollout_correction.rollout_is_threshold
algo.off_policy_mask | off_policy_mask_threshold
algo.normalize_scores |  | reward.normalize_enable normalize_reward
algo.clip_scores | reward_clip_range | reward.clip_range reward_clip_range |  | <value> | one number, the
    limit
algo.gamma | gamma | algo.advantage.gamma | algorithm.gamma
algo.lam | lam | algo.advantage.lambd lambd gae_lambda | algorithm.lam
algo.clip_value | cliprange_value | critic.value_clip value_clip | critic.cliprange_value
algo.loss_type | loss_type dpo_loss_type | model.ipo_enable
algo.label_smoothing | label_smoothing | model.label_smoothing
scorer.missing_eos_penalty | missing_eos_penalty
backend | deepspeed fsdp | ds.zero_stage zero_stage | actor.strategy | <value> | 0: zero0; 1: zero1;
    2: zero2; 3: zero3; or zero2_offload, zero3_offload
backend.compile | torch_compile | ds.deepcompile | actor.use_torch_compile
backend.ranks | num_processes | actor.num_gpus_per_node | trainer.n_gpus_per_node n_gpus_per_node |  | and
    start with torchrun --nproc-per-node <n> -m rlhf.train
"""


def parsed(text: str) -> Iterator[Foreign]:
    """Yield a row for each line of a table; an indented line continues the line before."""
    for line in re.sub(r"\n +", " ", text).strip().splitlines():
        key, *names, value, note = (
            cell.strip() for cell in f"{line}{' | ' * (5 - line.count('|'))}".split("|")
        )
        yield Foreign(key, (names[0], names[1], names[2]), note, value or None)


TABLE = tuple(parsed(TEXT))

# key here | names elsewhere | value here | remark
_OTHERS_TEXT = """
model.policy | name_or_path model_id base_model pretrained_model_name_or_path | | model.base for SFT
model.lora.rank | use_lora peft | 16
- | quantization quantization_config bnb_config qlora | | base weights are not quantized; to save memory set
    model.lora.rank=16 model.dtype=bfloat16
task.path | dataset_path data_path data train_file train_data data_files | | a file or folder, with task=local
algo.samples_per_prompt | num_return_sequences group_size num_samples n_samples
generator.response_length | max_tokens max_response_tokens
- | do_sample | | training always samples; generator.temperature and eval.temperature set how
- | stop stop_strings stop_words stop_sequences stop_token_ids | | the end tokens that the model declares
    end a response
schedule.prompts_per_update | batch_size global_batch_size | <value> | prompts; sequences of one forward pass:
    backend.micro_batch
schedule.total_epochs | epochs n_epochs | | passes over the data; passes over each batch: schedule.epochs
schedule.total_episodes | steps num_steps iterations num_updates total_updates max_updates | <value> |
    responses: updates x prompts_per_update x samples_per_prompt
schedule.eval_every | eval_interval eval_freq eval_frequency
schedule.save_every | save_interval save_freq checkpoint_every checkpoint_interval
- | save_strategy eval_strategy evaluation_strategy logging_strategy | | schedule.save_every, eval_every and
    log_every count updates
generator | vllm | vllm
logger | wandb use_wandb | wandb
backend.ranks | gpus num_gpus n_gpus ngpus | | and start with torchrun --nproc-per-node <n> -m rlhf.train
scorer.path | reward reward_fn reward_func reward_function reward_functions | <value> | <file>.py:<function>,
    with scorer=function
model.reward | reward_model rm_path | | a folder or a name of the hub
algo.kl_coef | kl kl_coeff kl_weight kl_penalty_coef
algo | algorithm method
output_dir | save_dir checkpoint_dir
"""


def _named_elsewhere(text: str) -> Iterator[Foreign]:
    """Yield a row for each line of the table of `OTHERS`; an indented line continues the line before."""
    for line in re.sub(r"\n +", " ", text).strip().splitlines():
        key, names, value, note = (
            cell.strip() for cell in f"{line}{' | ' * (3 - line.count('|'))}".split("|")
        )
        yield Foreign(key, ("", "", ""), note, value or None, names)


ELSEWHERE = tuple(_named_elsewhere(_OTHERS_TEXT))


def meaning(word: str, known: Collection[str] = ()) -> tuple[Foreign, str, str] | None:
    """Return the row, the name and the project of a setting of another project; None: no project has it.

    Args:
        word: the name as typed, with or without the sections before it.
        known: keys of this project that the config has, for a name with several meanings; empty: any.
    """
    wanted = plain(word)
    found: dict[bool, list[tuple[Foreign, str, str]]] = {True: [], False: []}
    for each in (*TABLE, *ELSEWHERE):
        for name, project in each.named():
            if f".{wanted}".endswith(f".{plain(name)}"):
                found[True].append((each, name, project))
            elif plain(name).rpartition(".")[2] == wanted.rpartition(".")[2]:
                found[False].append((each, name, project))
    longest = max((len(name) for _, name, _ in found[True]), default=0)  # with the most sections
    matches = [match for match in found[True] if len(match[1]) == longest] or found[False]
    return next((match for match in matches if match[0].key in known), matches[0] if matches else None)


def plain(name: str) -> str:
    """Return a name in lower case, with `_` in place of `-` and without signs of Hydra before it."""
    return name.lower().lstrip("+~-").replace("-", "_")
