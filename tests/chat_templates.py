"""Short chat templates with the constructs of well-known families', and conversations for them.

They are ours, not the published texts: each uses what its family's template relies on.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = """\
{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") | length | string %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("no first user message to put tools in") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
                and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content =
                content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}
{% if message['content'] is string %}{{ message['content'] | trim }}
{% elif message['content'] is iterable %}
    {% for item in message['content'] %}
        {% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
    {% endfor %}
{% else %}{{ raise_exception("Invalid content type") }}{% endif %}
{{ '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

PHI = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}\
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] in ['user', 'tool'] %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

DEEPSEEK_R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{bos_token}}{{ns.system_prompt}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{% set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}
{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}
"""

SMOLLM3 = """\
{# A comment. #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- macro header(role) -%}<|im_start|>{{ role }}{{ "\\n" }}{%- endmacro -%}
{{ header("system") }}
{%- if messages[0].role == "system" -%}
  {%- set instructions = messages[0].content.replace("/no_think", "").rstrip() -%}
{%- else -%}
  {%- set instructions = "Year of " ~ (strftime_now("%Y") | length) ~ " digits" -%}
{%- endif -%}
{{ instructions }} {{ reasoning_mode }}{{ "<|im_end|>\\n" }}
{%- for message in messages -%}
  {%- if message.role == "system" -%}{%- continue -%}{%- endif -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "assistant" -%}
    {% generation %}{{ header("assistant") ~ content.lstrip("\\n") }}{% endgeneration %}
    {{- "<|im_end|>\\n" }}
  {%- else -%}
    {{ header(message.role) ~ content ~ "<|im_end|>\\n" }}
  {%- endif -%}
  {%- if loop.index > 20 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ header("assistant") }}{%- endif -%}
"""

COMMAND_R = """\
{{ bos_token }}{% if documents %}{% for document in documents %}
Document: {{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}{% endif %}
{%- set seen = dict(a=1) -%}
{{ messages | map(attribute="role") | join(",") }}{{ seen | items | list | length }}
{%- for m in messages | rejectattr("role", "equalto", "system") %}
|{{ m.role[:1] | upper }}:{{ m.content }}
{%- endfor %}{{ "x" ~ 1.5 ~ none ~ true }}{{ [3, 1, 2] | sort | tojson }}{{ "é<&>" | tojson }}
"""

TEMPLATES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek-r1": DEEPSEEK_R1,
    "smollm3": SMOLLM3,
    "command-r": COMMAND_R,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a place, in °C <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_USER = {"role": "user", "content": "Hi, I'm Zoë & <b>'you'</b>\n"}
_ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello! "}
_SYSTEM = {"role": "system", "content": " Be brief. /no_think "}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    ],
}
_RESULT = {"role": "tool", "content": '{"temperature": 22}', "name": "weather"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([_USER], {"add_generation_prompt": True}),
    "no prompt": ([_USER, _ANSWER], {"add_generation_prompt": False}),
    "three turns": ([_USER, _ANSWER, _USER], {"add_generation_prompt": True}),
    "system": ([_SYSTEM, _USER], {"add_generation_prompt": True}),
    "not thinking": ([_USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "tools": ([_SYSTEM, _USER], {"add_generation_prompt": True, "tools": True}),
    "tool results": ([_USER, _CALL, _RESULT], {"add_generation_prompt": True, "tools": True}),
    "wrong turns": ([_USER, _USER], {"add_generation_prompt": True}),
    "documents": (
        [_USER],
        {"documents": [{"title": "T", "text": "x < y"}], "date_string": "01 Jan 2026"},
    ),
}
