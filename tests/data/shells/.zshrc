# The line, with all words that TAB offers inserted (Alt-*), is saved by Ctrl-O.
PS1='READY> '
autoload -Uz compinit; compinit -D -u
eval "$(so-tui completion zsh)"
_all() { _main_complete "$@"; compstate[insert]=all; compstate[list]= ; }
_save() { print -rn -- "$BUFFER"$'\0' >> "$TYPED"; BUFFER=; }
zle -C all complete-word _all
zle -N _save
bindkey -e
bindkey '\e*' all
bindkey '^O' _save
