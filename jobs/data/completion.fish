# weightstream at TAB, for fish:  weightstream completion fish | source
function __weightstream_answers
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
complete -c weightstream -f -a '(__weightstream_answers)'
