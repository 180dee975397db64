#compdef weightstream
# weightstream at TAB, for zsh:  source <(weightstream completion zsh)
_weightstream() {
    local -a found
    found=(${(f)"$("${words[1]}" completion answer "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    else
        compset -P '*='
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _weightstream weightstream
