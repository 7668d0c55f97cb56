# kvreplay's development kit: policies that are compiled apart and loaded by `kvreplay replay --plugin mine.so`.
#
#   find_package(kvreplay REQUIRED)
#   kvreplay_add_plugin(mine mine.cpp)
if(NOT TARGET kvreplay::policies)
  add_library(kvreplay::policies INTERFACE IMPORTED)
  get_filename_component(kvreplay_headers "${CMAKE_CURRENT_LIST_DIR}/../../../include/kvreplay" ABSOLUTE)
  target_include_directories(kvreplay::policies INTERFACE ${kvreplay_headers})
  target_compile_features(kvreplay::policies INTERFACE cxx_std_20)
endif()

# A plug-in TARGET.so of the sources that follow. What it calls of kvreplay, the program that loads it has.
function(kvreplay_add_plugin target)
  add_library(${target} MODULE ${ARGN} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin_stamp.cpp)
  set_target_properties(${target} PROPERTIES PREFIX "" SUFFIX .so)
  target_link_libraries(${target} PRIVATE kvreplay::policies)
  target_link_options(${target} PRIVATE LINKER:-z,undefs)
  # Policies work on every token of every layer: optimised, where the project does not say.
  target_compile_options(${target} PRIVATE $<$<CONFIG:>:-O2>)
endfunction()
