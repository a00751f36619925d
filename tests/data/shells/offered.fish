so-tui completion fish | source
for line in $argv
    echo (complete -C $line | string replace -r '\t.*' '')
end
