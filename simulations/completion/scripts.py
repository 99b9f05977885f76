"""The scripts that `fedsign completion` prints. Each asks `fedsign` itself, so that it stays up to date."""

SCRIPTS = {
    "bash": r"""# bash completion of fedsign; in ~/.bashrc: eval "$(fedsign completion bash)"
_fedsign() {
    local IFS=$'\n'
    COMPREPLY=($(_FEDSIGN_COMPLETE=bash "$1" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=./,] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _fedsign fedsign
""",
    "zsh": r"""#compdef fedsign
# zsh completion of fedsign; in ~/.zshrc, after compinit: eval "$(fedsign completion zsh)"
_fedsign() {
    local line value
    local -a lines closed closed_shown open open_shown
    lines=("${(@f)$(_FEDSIGN_COMPLETE=zsh "${words[1]}" "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in $lines; do
        value="${line%%$'\t'*}"
        if [[ $value == *[=./,] ]]; then
            open+=("$value"); open_shown+=("${line/$'\t'/  -- }")
        else
            closed+=("$value"); closed_shown+=("${line/$'\t'/  -- }")
        fi
    done
    (( $#open + $#closed )) || { _files; return }
    (( $#open )) && compadd -S '' -l -d open_shown -a open
    (( $#closed )) && compadd -l -d closed_shown -a closed
    return 0
}
if [[ "$funcstack[1]" == _fedsign ]]; then _fedsign "$@"; else compdef _fedsign fedsign; fi
""",
    "fish": r"""# fish completion of fedsign: fedsign completion fish > ~/.config/fish/completions/fedsign.fish
function __fedsign_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (_FEDSIGN_COMPLETE=fish command $words[1] $words[2..] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c fedsign -f -a '(__fedsign_complete)'
""",
}
