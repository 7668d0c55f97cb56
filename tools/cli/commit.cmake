# Writes OUTPUT with the commit of SOURCE, and only when it changed. Without git, or outside a checkout: "unknown".
set(commit unknown)
find_program(git git)
if(git)
  execute_process(
    COMMAND ${git} -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE problem ERROR_QUIET)
  if(problem EQUAL 0)
    set(commit ${head})
    execute_process(COMMAND ${git} -C ${SOURCE} status --porcelain --untracked-files=no
                    OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit "+")
    endif()
  endif()
endif()
set(content "#include \"build.h\"\n\nconst char* const kvreplay::build_commit = \"${commit}\";\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT "${before}" STREQUAL "${content}")
  file(WRITE ${OUTPUT} "${content}")
endif()
