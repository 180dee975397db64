# millrace at TAB, for fish:  millrace completion fish | source
function __millrace_answers
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l found ($before[1] completion answer $before[2..] "$word" 2>/dev/null)
    set -l key (string match -r '^[^=]*=' -- "$word")
    if test -n "$found"
        printf '%s\n' $found
    else if test -n "$key"
        printf "$key%s\n" (__fish_complete_path (string replace -- "$key" '' "$word"))
    end
end
complete -c millrace -f -a '(__millrace_answers)'
