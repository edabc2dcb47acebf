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
