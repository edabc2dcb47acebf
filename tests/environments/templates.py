"""Chat templates in the shapes of model families, and byte-level BPE tokenizers with merges for them."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LOOP, END = "{% for m in messages %}", "{% endfor %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)
CHATML = (
    LOOP + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # fmt: skip
THOUGHTS = (  # of earlier replies are left out; a result of a tool is a turn of the user, as in Qwen 3
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + LOOP
    + "{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}"
    + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
DEEPSEEK_TURNS = (
    "{{ '<｜begin▁of▁sentence｜>' }}" + LOOP + "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}" + END
)
FAMILIES = {  # special tokens, the last of which ends a reply; template
    "chatml": (IM, CHATML),
    "trims": (IM, CHATML.replace("m.content", "m.content | trim")),
    "drops_thoughts": (IM, THOUGHTS),
    "rewrites_history": (  # the system prompt has the last question
        IM,
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ '<|im_start|>system\\nTopic: ' + asked[-1].content + '<|im_end|>\\n' }}" + CHATML,
    ),
    "llama_3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ '<|begin_of_text|>' }}"
        + LOOP
        + "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
        + END
        + "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    "mistral": (  # its role marks are no tokens here
        ("<s>", "</s>"),
        "{{ '<s>' }}" + LOOP + ALTERNATE + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}" + END,
    ),
    "gemma": (
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "{{ '<bos>' }}"
        + LOOP
        + ALTERNATE
        + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"
        + END
        + "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    "phi_3": (  # white space behind its special tokens is a part of the tokens
        ("<|user|>", "<|assistant|>", "<|end|>"),
        LOOP + "{% if m.role != 'tool' %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}"
        + END + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    "deepseek": (
        DEEPSEEK,
        DEEPSEEK_TURNS + "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ),
    "starts_thinking": (  # as in DeepSeek R1
        DEEPSEEK,
        DEEPSEEK_TURNS + "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
    ),
    "glm": (  # the mark of the next turn ends a reply
        ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        LOOP + "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}" + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    "gpt_oss": (  # the last reply ends otherwise than earlier replies
        ("<|start|>", "<|message|>", "<|end|>", "<|return|>"),
        LOOP + "{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{% set final = loop.last and m.role == 'assistant' and not add_generation_prompt %}"
        "{{ '<|return|>' if final else '<|end|>' }}"
        + END + "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ),
    "counts": (IM, CHATML.replace("'\\n' + m.content", "' ' + loop.index | string + '\\n' + m.content")),
}  # fmt: skip
CORPUS = (
    "a question of a user\n\nthe answer of an assistant\n\n\nis 12 or 1234 <think>\n\n</think>\n\n",
    "    def step(self, reply):\n        return {'a': [1, 2]}\n\n",
    "user assistant tool system message of the environment; the reply is higher, lower!",
)


@cache
def vocabulary() -> Tokenizer:
    """Return byte-level BPE with about 200 merges, for example of two newlines and of four spaces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=460, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(CORPUS * 20, trainer)
    return core


def family(name: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens and the template of a family."""
    special, own = FAMILIES[name]
    core = Tokenizer.from_str(vocabulary().to_str())
    strips = name == "phi_3"
    core.add_special_tokens([AddedToken(each, special=True, rstrip=strips) for each in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=AddedToken(special[-1], special=True, rstrip=strips),
        pad_token=special[0],
        chat_template=template or own,
        clean_up_tokenization_spaces=False,
    )
