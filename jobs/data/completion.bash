# weightstream at TAB, for bash 4 or newer:  source <(weightstream completion bash)
_weightstream() {
    local line=${COMP_LINE:0:COMP_POINT} words word
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[-1]}
    mapfile -t COMPREPLY < <("${words[0]}" completion answer "${words[@]:1}" 2>/dev/null)
    # readline puts a reply in the place of what stands behind the last of COMP_WORDBREAKS
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    [[ ${COMPREPLY[0]-} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _weightstream weightstream
