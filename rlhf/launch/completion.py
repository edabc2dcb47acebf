"""Tab completion of the command `rlhf` in bash, zsh and fish. This module imports no torch.

The script of a shell calls `rlhf --complete <words>` with the words up to the cursor, and gets the candidates
for the last word, one per line. Where there are none, the shell completes names of files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from rlhf.config.catalogue import groups, options
from rlhf.config.compose import compose_node
from rlhf.config.mistakes import CONFIG_ERRORS
from rlhf.launch.command_line import FLAGS
from rlhf.launch.hydra_internals import matching_keys

_HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")

_BASH = r"""
_rlhf() {
    local line=${COMP_LINE:0:COMP_POINT} words word breaks IFS=$' \t\n'
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[-1]}
    IFS=$'\n'
    COMPREPLY=($("${words[0]}" --complete "${words[@]:1}" 2>/dev/null))
    # bash replaces only the part of the word after the last sign of COMP_WORDBREAKS
    breaks=${COMP_WORDBREAKS//[^@=:]/}
    if [[ -n $breaks && $word == *["$breaks"]* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*["$breaks"]}"}"}")
    fi
    [[ ${COMPREPLY[0]-} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _rlhf rlhf
"""
_ZSH = r"""#compdef rlhf
_rlhf() {
    local -a found
    found=(${(f)"$($words[1] --complete "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=./]}
        compadd -- ${found:#*[=./]}
    else
        compset -P '*='
        _files
    fi
}
compdef _rlhf rlhf
"""
_FISH = r"""
function __rlhf_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    set -l word (commandline -ct)
    $program --complete $words "$word" 2>/dev/null
end
complete -c rlhf -a '(__rlhf_complete)'
"""
SCRIPTS = {"bash": _BASH.lstrip(), "zsh": _ZSH, "fish": _FISH.lstrip()}


def candidates(words: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Return the arguments that can stand in place of the last word of a command line.

    Args:
        words: the arguments of a command up to the cursor. The last word is unfinished, and may be empty.
            The option `--config-dir` among them is read from the command line of this process.
        own: the command's own arguments, which are no overrides, such as `run` of `run=<folder>`.
    """
    *before, word = words
    if word.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(word)]
    if before[-1:] in (["--config-dir"], ["-cd"]):
        return []  # the shell completes names of folders
    overrides = [  # without swept values (a,b), which only Hydra's sweeper reads
        each for each in before if re.fullmatch(r"[^-=][^=]*=[^,]*", each) and each.split("=")[0] not in own
    ]
    group, equals, value = word.partition("=")
    if found := options(group.partition("@")[0]) if equals else {}:  # scorer@gold= has the options of scorer=
        return [f"{group}={option}" for option in found if option.startswith(value)]
    try:
        keys = matching_keys(compose_node(overrides), word)
    except CONFIG_ERRORS:  # of the words before; the command explains them
        keys = []
    return [
        *(f"{name}=" for name in (*own, *groups(), *_HYDRA_GROUPS) if name.startswith(word)),
        *(key for key in keys if not key.endswith(".name=")),
    ]
