"""Chat templates of different kinds, for tokenizers with the special tokens `<s>`, `</s>`, `<|end|>`, ..."""

from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from tests.chat_tokenizers import byte_level, fast

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|call_end|>", "<|pad|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n", "  ")  # tokens, but not special

LOOP = "{% for m in messages %}"
START = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
)
REASONS = (  # the last answer has a block of reasoning, earlier answers have none
    LOOP + "{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% else %}{% set thought = (m.reasoning_content or '') %}{% endif %}"
    "{{ '<|assistant|>\\n' }}"
    "{% if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content + '<|end|>\\n' }}"
    "{% else %}{{ '<|user|>\\n' + content + '<|end|>\\n' }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "chatml": LOOP + "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}" + START,
    "trimmed": LOOP + "{{ '<|' + m['role'] + '|>' + (m['content'] | trim) + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "no_start": LOOP + "{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}",
    "suffix": LOOP + "{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ ' [done]' }}{% endif %}{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "two_ends": LOOP + "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|></s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "no_end": LOOP + "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "no_newline": LOOP + "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "folded_system": "{% set ns = namespace(system='') %}"
    + LOOP
    + "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\\n\\n' %}"
    "{% else %}{{ '<|' + m['role'] + '|>' + (ns.system if m['role'] == 'user' else '') + m['content'] }}"
    "{{ '<|end|>' }}{% if m['role'] == 'user' %}{% set ns.system = '' %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "default_system": "{% if messages[0]['role'] != 'system' %}{{ '<|system|>Be kind.<|end|>' }}{% endif %}"
    + LOOP
    + "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "clock": "{{ 'Today: ' + strftime_now('%d %b %Y %H:%M:%S') + '\\n' }}"
    + LOOP
    + "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "thinking": REASONS + "{% if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' }}{% endif %}",
    "thinking_optional": REASONS + START,
    "tools": "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '\\n' }}{% endif %}"
    + LOOP
    + "{{ '<|' + m['role'] + '|>' + m['content'] }}"
    + CALLS
    + "{{ '<|call_end|>' if m.tool_calls else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}
TEMPLATES["paragraphs"] = TEMPLATES["no_end"].replace("'\\n'", "'\\n\\n'")  # an added token that is no end
# The whole dialogue ends with another text than a prompt.
TEMPLATES["closed"] = TEMPLATES["chatml"] + "{% if not add_generation_prompt %}{{ '[closed]' }}{% endif %}"
# The start of a reply has a block of reasoning that the template does not write for a stored answer.
TEMPLATES["starts_thinking"] = TEMPLATES["chatml"].replace(
    START, START.replace("'<|assistant|>\\n'", "'<|assistant|>\\n<think>\\n'")
)
# As before, and a whole dialogue ends with a text that is longer than the start of a reply.
TEMPLATES["starts_thinking_closed"] = (
    TEMPLATES["starts_thinking"] + "{% if not add_generation_prompt %}{{ '[closed]' * 9 }}{% endif %}"
)
# The end of a turn is known although the template changes the content.
TEMPLATES["shouted"] = TEMPLATES["chatml"].replace("m['content']", "(m['content'] | upper)")


def with_template(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the template `name`; its own end token `</s>` ends a document."""
    core = byte_level(SPECIAL)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast(core, TEMPLATES[name], bos_token="<s>", eos_token="</s>", pad_token="<|pad|>")
