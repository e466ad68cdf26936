/* `sooth completion`: scripts for bash, zsh and fish, generated from the tables of commands and
 * options.
 *
 * The scripts complete commands, options, the values of options that can be listed, file names, and
 * names of models. At completion time the script gets the names of models from `sooth completion
 * models`; everything else is in the script. Long aliases are not offered, but bash completes their
 * values.
 *
 * Help texts reach the scripts in single quotes. They are ASCII and our own, so escaping them is a
 * matter of form and not of safety. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "cli/help.h"
#include "cli/models.h"
#include "cli/options.h"
#include "draft/spec.h"
#include "format/dtype.h"

typedef enum value_kind {
    NO_VALUE,
    ANY_VALUE, /* a text or a number: nothing to offer */
    FILES,
    MODELS, /* names, files and folders */
    WORDS,
} value_kind;

/* --- what can be offered --- */

static void add_word(so_buf *out, const char *word, size_t len) {
    so_buf_printf(out, "%s%.*s", out->len ? " " : "", (int)len, word);
}

/* "a|b|lenient=L" as "a b lenient=". */
static void add_choices(so_buf *out, const char *choices) {
    for (const char *at = choices; *at;) {
        size_t len = strcspn(at, "|"), word = strcspn(at, "|=");
        add_word(out, at, word + (at[word] == '='));
        at += len + (at[len] == '|');
    }
}

static void add_types(so_buf *out) {
    for (int i = 0; i < SO_DTYPE_COUNT; i++) {
        if (so_dtype_in_gguf(i))
            add_word(out, so_dtype_get(i)->name, strlen(so_dtype_get(i)->name));
    }
}

static void add_drafters(so_buf *out) {
    for (int i = 0; i < SO_SPEC_N_NAMES; i++) {
        const char *name = so_spec_name_text((so_spec_name)i);
        add_word(out, name, strlen(name));
    }
}

static void add_commands(so_buf *out) {
    for (int i = 0; so_command_at(i); i++)
        add_word(out, so_command_at(i)->name, strlen(so_command_at(i)->name));
}

/* The first word of each line of "a\tmeaning\n…". */
static void add_args(so_buf *out, const char *line) {
    while (*line) {
        add_word(out, line, strcspn(line, "\t"));
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
}

/* The kind of an option's value. If the possible values can be listed, they are appended to
 * `words`. */
static value_kind option_value(so_opt id, so_buf *words) {
    const so_option *o = so_option_at(id);
    if (o->type == SO_TYPE_FLAG)
        return NO_VALUE;
    if (strcmp(o->value, "FILE|FOLDER|NAME") == 0)
        return MODELS;
    if (strncmp(o->value, "FILE", 4) == 0)
        return FILES;
    if (id == SO_OPT_QUANTIZE)
        add_types(words);
    else if (id == SO_OPT_SPEC)
        add_drafters(words);
    else if (o->choices)
        add_choices(words, o->choices);
    return words->len ? WORDS : ANY_VALUE;
}

/* The same for the arguments of a command. */
static value_kind command_argument(const so_command *c, so_buf *words) {
    switch (c->bit) {
    case SO_CMD_PULL:
        for (int i = 0; so_pull_model_at(i); i++)
            add_word(words, so_pull_model_at(i)->name, strlen(so_pull_model_at(i)->name));
        return WORDS;
    case SO_CMD_INSPECT:
        return MODELS;
    case SO_CMD_QUANTIZE: /* IN OUT TYPE: two files and a type */
        add_types(words);
        return FILES;
    case SO_CMD_TRACE:
        return FILES;
    default:
        if (c->args)
            add_args(words, c->args);
        return c->args ? WORDS : NO_VALUE;
    }
}

static void add_topics(so_buf *out) {
    for (int i = 0; so_topic_at(i); i++)
        add_word(out, so_topic_at(i)->name, strlen(so_topic_at(i)->name));
}

/* --- bash --- */

/* "-m|--model|--alias)" */
static void bash_pattern(const so_option *o) {
    printf("    ");
    if (o->letter)
        printf("-%s | ", o->letter);
    printf("--%s", o->name);
    for (const char *at = o->aliases ? o->aliases : ""; *at;) {
        size_t len = strcspn(at, " ");
        printf(" | --%.*s", (int)len, at);
        at += len + (at[len] == ' ');
    }
    printf(")\n");
}

static void bash_offer(value_kind kind, const char *words) {
    if (kind == MODELS)
        printf("        _sooth_offer \"$(\"${COMP_WORDS[0]}\" completion models 2>/dev/null)\"\n");
    if (kind == WORDS || (kind == FILES && *words))
        printf("        _sooth_offer '%s'\n", words);
    if (kind == MODELS || kind == FILES)
        printf("        _sooth_files\n");
}

static void bash_values(void) {
    printf("    case $prev in\n");
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        so_buf words = {0};
        value_kind kind = option_value((so_opt)i, &words);
        if (kind != NO_VALUE && so_option_at((so_opt)i)->type != SO_TYPE_OPTIONAL) {
            bash_pattern(so_option_at((so_opt)i));
            bash_offer(kind, so_buf_str(&words).ptr);
            printf("        return\n        ;;\n");
        }
        so_buf_free(&words);
    }
    printf("    esac\n");
}

static void bash_commands(void) {
    printf("    case ${COMP_WORDS[1]} in\n");
    for (int i = 0; so_command_at(i); i++) {
        const so_command *c = so_command_at(i);
        so_buf options = {0}, words = {0};
        value_kind kind = command_argument(c, &words);
        for (int k = 0; k < SO_OPT_COUNT; k++) {
            const so_option *o = so_option_at((so_opt)k);
            if (!(o->cmds & c->bit))
                continue;
            if (o->letter)
                so_buf_printf(&options, "-%s ", o->letter);
            so_buf_printf(&options, "--%s ", o->name);
            if (o->type == SO_TYPE_OPTIONAL)
                so_buf_printf(&options, "--%s=%s ", o->name, o->choices);
        }
        printf("    %s)\n        if [[ $cur == -* ]]; then\n            _sooth_offer '%.*s'\n",
               c->name, (int)options.len - 1, options.data);
        if (kind != NO_VALUE) {
            printf("            return\n        fi\n");
            bash_offer(kind, so_buf_str(&words).ptr);
            printf("        ;;\n");
        } else {
            printf("        fi\n        ;;\n");
        }
        so_buf_free(&options);
        so_buf_free(&words);
    }
    so_buf names = {0};
    add_commands(&names);
    add_topics(&names);
    printf("    help) _sooth_offer '%s' ;;\n    esac\n", names.data);
    so_buf_free(&names);
}

static void print_bash(void) {
    so_buf names = {0};
    add_commands(&names);
    fputs("# bash completion for sooth; made by `sooth completion bash`\n"
          "\n"
          "# Words that begin with $cur. One that ends with '=' waits for a value.\n"
          "_sooth_offer() {\n"
          "    local word words\n"
          "    IFS=$' \\t\\n' read -r -d '' -a words <<<\"$1\"\n"
          "    for word in \"${words[@]}\"; do\n"
          "        [[ $word == \"$cur\"* ]] && COMPREPLY+=(\"$word\")\n"
          "    done\n"
          "    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace "
          "2>/dev/null\n"
          "}\n"
          "\n"
          "_sooth_files() {\n"
          "    local file\n"
          "    while IFS= read -r file; do\n"
          "        COMPREPLY+=(\"$file\")\n"
          "    done < <(compgen -f -- \"$cur\")\n"
          "    compopt -o filenames 2>/dev/null\n"
          "}\n"
          "\n"
          "_sooth() {\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
          "    COMPREPLY=()\n"
          "    # --option=value arrives as three words\n"
          "    if [[ $cur == = ]]; then\n"
          "        cur=\n"
          "    elif [[ $prev == = ]]; then\n"
          "        prev=${COMP_WORDS[COMP_CWORD - 2]}\n"
          "    fi\n"
          "    if ((COMP_CWORD == 1)); then\n",
          stdout);
    printf("        _sooth_offer '%s help --help --version'\n        return\n    fi\n", names.data);
    bash_values();
    bash_commands();
    fputs("}\n\ncomplete -F _sooth sooth\n", stdout);
    so_buf_free(&names);
}

/* --- zsh --- */

/* Escapes a help text for '[…]' of an option or for "name:text", inside single quotes. */
static void zsh_text(const char *text) {
    for (; *text; text++) {
        if (strchr("[]:\\", *text))
            putchar('\\');
        fputs(*text == '\'' ? "'\\''" : (char[2]){*text, '\0'}, stdout);
    }
}

static void zsh_action(value_kind kind, const char *words) {
    if (kind == MODELS)
        fputs("_sooth_models", stdout);
    else if (kind == FILES && *words)
        printf(" _sooth_files_or %s", words); /* after a space zsh adds no arguments of its own */
    else if (kind == FILES)
        fputs("_files", stdout);
    else if (kind == WORDS)
        printf("(%s)", words);
    else
        putchar(' ');
}

static void zsh_option(so_opt id, int cmd_bit) {
    const so_option *o = so_option_at(id);
    so_buf words = {0};
    value_kind kind = option_value(id, &words);
    const char *repeat = o->type == SO_TYPE_LIST || id == SO_OPT_VERBOSE ? "*" : "";
    const char *equals = kind == NO_VALUE ? "" : o->type == SO_TYPE_OPTIONAL ? "=-" : "=";
    printf(" \\\n            ");
    if (o->letter && *repeat)
        printf("'*'{-%s,--%s%s}", o->letter, o->name, equals);
    else if (o->letter)
        printf("'(-%s --%s)'{-%s,--%s%s}", o->letter, o->name, o->letter, o->name, equals);
    else
        printf("'%s--%s%s'", repeat, o->name, equals);
    printf("'[");
    zsh_text(so_option_help(id, cmd_bit));
    printf("]");
    if (kind != NO_VALUE) {
        printf(o->type == SO_TYPE_OPTIONAL ? "::" : ":");
        zsh_text(o->value);
        printf(":");
        zsh_action(kind, so_buf_str(&words).ptr);
    }
    putchar('\'');
    so_buf_free(&words);
}

static void zsh_command(const so_command *c) {
    so_buf words = {0};
    value_kind kind = command_argument(c, &words);
    printf("    %s)\n        _arguments -S", c->name);
    for (int k = 0; k < SO_OPT_COUNT; k++)
        if (so_option_at((so_opt)k)->cmds & c->bit)
            zsh_option((so_opt)k, c->bit);
    if (c->max_pos > 0) {
        printf(" \\\n            '%s:argument:", c->max_pos == 1 ? "1" : "*");
        zsh_action(kind, so_buf_str(&words).ptr);
        putchar('\'');
    }
    printf("\n        ;;\n");
    so_buf_free(&words);
}

static void print_zsh(void) {
    so_buf names = {0};
    fputs("#compdef sooth\n"
          "# zsh completion for sooth; made by `sooth completion zsh`\n"
          "\n"
          "_sooth_models() {\n"
          "    local -a names\n"
          "    names=(${(f)\"$(_call_program models $_sooth_program completion models)\"})\n"
          "    _alternative 'models:model:compadd -a names' 'files:file:_files'\n"
          "}\n"
          "\n"
          "_sooth_files_or() {\n"
          "    local -a others=(\"$@\")\n"
          "    _alternative 'words:type:compadd -a others' 'files:file:_files'\n"
          "}\n"
          "\n"
          "_sooth() {\n"
          "    local _sooth_program=$words[1] curcontext=$curcontext\n"
          "    local -a commands=(\n",
          stdout);
    for (int i = 0; so_command_at(i); i++) {
        printf("        '%s:", so_command_at(i)->name);
        zsh_text(so_command_at(i)->summary);
        printf("'\n");
    }
    fputs("        'help:show help'\n"
          "    )\n"
          "    if ((CURRENT == 2)); then\n"
          "        _describe -t commands command commands\n"
          "        return\n"
          "    fi\n"
          "    shift words\n"
          "    ((CURRENT--))\n"
          "    curcontext=${curcontext%:*:*}:sooth-$words[1]:\n"
          "    case $words[1] in\n",
          stdout);
    for (int i = 0; so_command_at(i); i++)
        zsh_command(so_command_at(i));
    add_commands(&names);
    add_topics(&names);
    printf("    help) _arguments '1:command or topic:(%s)' ;;\n", names.data);
    fputs("    esac\n"
          "}\n"
          "\n"
          "if [[ $funcstack[1] == _sooth ]]; then\n"
          "    _sooth \"$@\"\n"
          "else\n"
          "    compdef _sooth sooth\n"
          "fi\n",
          stdout);
    so_buf_free(&names);
}

/* --- fish --- */

static void fish_text(const char *text) {
    putchar('\'');
    for (; *text; text++) {
        if (strchr("'\\", *text))
            putchar('\\');
        putchar(*text);
    }
    putchar('\'');
}

static void fish_values(value_kind kind, const char *words) {
    if (kind == FILES || kind == MODELS)
        printf(" -F");
    if (kind == MODELS)
        printf(" -a '(command -q sooth; and sooth completion models)'");
    if (*words)
        printf(" -a '%s'", words);
}

static void fish_option(so_opt id) {
    const so_option *o = so_option_at(id);
    so_buf words = {0};
    value_kind kind = option_value(id, &words);
    printf("complete -c sooth -n '__fish_seen_subcommand_from");
    for (int i = 0; so_command_at(i); i++)
        if (so_command_at(i)->bit & o->cmds)
            printf(" %s", so_command_at(i)->name);
    printf("'");
    if (o->letter)
        printf(" -%s %s", strlen(o->letter) == 1 ? "s" : "o", o->letter);
    printf(" -l %s", o->name);
    if (kind != NO_VALUE && o->type != SO_TYPE_OPTIONAL)
        printf(kind == FILES || kind == MODELS ? " -r" : " -x");
    fish_values(kind, so_buf_str(&words).ptr);
    printf(" -d ");
    fish_text(o->help);
    putchar('\n');
    so_buf_free(&words);
}

static void print_fish(void) {
    so_buf names = {0};
    fputs("# fish completion for sooth; made by `sooth completion fish`\n"
          "complete -c sooth -f\n",
          stdout);
    for (int i = 0; so_command_at(i); i++) {
        const so_command *c = so_command_at(i);
        so_buf words = {0};
        value_kind kind = command_argument(c, &words);
        printf("complete -c sooth -n __fish_use_subcommand -a %s -d ", c->name);
        fish_text(c->summary);
        putchar('\n');
        if (kind != NO_VALUE) {
            printf("complete -c sooth -n '__fish_seen_subcommand_from %s'", c->name);
            fish_values(kind, so_buf_str(&words).ptr);
            putchar('\n');
        }
        so_buf_free(&words);
    }
    add_commands(&names);
    add_topics(&names);
    printf("complete -c sooth -n __fish_use_subcommand -a help -d 'show help'\n"
           "complete -c sooth -n '__fish_seen_subcommand_from help' -a '%s'\n",
           names.data);
    for (int i = 0; i < SO_OPT_COUNT; i++)
        fish_option((so_opt)i);
    so_buf_free(&names);
}

/* --- the command --- */

static void print_name(void *user, const char *name) {
    (void)user;
    puts(name);
}

int so_cmd_completion(int argc, char **argv) {
    so_args a;
    int status = 0;
    if (!so_args_parse(&a, SO_CMD_COMPLETION, argc, argv))
        return a.status;
    if (strcmp(a.pos[0], "bash") == 0)
        print_bash();
    else if (strcmp(a.pos[0], "zsh") == 0)
        print_zsh();
    else if (strcmp(a.pos[0], "fish") == 0)
        print_fish();
    else if (strcmp(a.pos[0], "models") == 0)
        so_model_each_name(print_name, NULL);
    else
        status = so_args_bad(&a, "'%.40s': must be bash, zsh, fish or models", a.pos[0]);
    so_args_free(&a);
    return status;
}
