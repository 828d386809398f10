"""Toy chat templates, each with one property of real ones."""

from spanlab.queries.render import CHATML

BOS = "<|endoftext|>"
# A separate BOS, a default system prompt first, and contents without spaces at their ends.
TRIMMING = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINED = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n' }}assistant:{% endif %}"
)
# Every message begins with the BOS, and only so; or users' messages alone do.
OPENING = CHATML.replace("<|im_start|>", BOS)
ONLY_USERS_BEGIN = CHATML.replace("<|im_start|>{{", "{% if message.role == 'user' %}" + BOS + "{% endif %}{{")
DOUBLED = OPENING.replace(BOS + "assistant", BOS + BOS + "assistant")
NUMBERED = CHATML.replace("<|im_start|>{{", "<|im_start|>{{ loop.index }} {{")
BRACKETS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
WITHOUT_OPENING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A mark that a user's message and an assistant's behind it share.
SHARED_MARK = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}>{% else %}"
    "{% if loop.first or loop.previtem.role != 'user' %}>{% endif %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
ANSWERS_NUMBERED = CHATML.replace(
    "<|im_start|>{{", "<|im_start|>{% if message.role == 'assistant' %}{{ loop.index }}{% endif %}{{"
)


def closing_by_length(length: int) -> str:
    """A template that closes messages differently from `length` messages on."""
    return (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}"
        f"{{{{ '[/END]' if loop.length >= {length} else '[/INST]' }}}}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
